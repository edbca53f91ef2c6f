"""Corruptions: determined by the seed, same size and mode, stronger with severity, equal to closed forms where there are."""

from __future__ import annotations

import colorsys
import io
import random
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from fedvlm.backbones import load
from fedvlm.config.config import resolve
from fedvlm.data.corruptions import KINDS, _convolve, _kernel, _sample, corrupt
from fedvlm.data.pool import Pools, with_corruptions
from fedvlm.data.source import EMOJI, decode, digest
from fedvlm.data.store import corrupted
from fedvlm.errors import FedvlmError
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun

FIXED = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
}  # without random numbers
COLOURED = {"gaussian_noise", "shot_noise", "impulse_noise", "frost"}  # they colour a grey image; the others do not


def array(image: Image.Image) -> np.ndarray:
    return np.asarray(image, dtype=np.float64) / 255


def scene(width: int, height: int, seed: int) -> Image.Image:
    """Smooth coloured noise at several scales, as in a photograph."""
    draw = np.random.default_rng(seed)
    total = np.full((height, width, 3), 115.0)
    for cells in (2, 4, 8, 16, 32):
        grid = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += (np.asarray(grid.resize((width, height), Image.Resampling.BICUBIC), float) - 128) / cells**0.5 / 1.5
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def pictures(side: int) -> list[Image.Image]:
    with zipfile.ZipFile(EMOJI) as box:
        names = sorted(n for n in box.namelist() if n.endswith(".png"))[::900]
        drawn = [Image.open(io.BytesIO(box.read(n))).convert("RGB").resize((side, side)) for n in names[:3]]
    return [*drawn, *(scene(side, side, seed) for seed in range(4))]


def test_there_are_fifteen():
    assert len(KINDS) == len(set(KINDS)) == 15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (3, 2), (2, 3), (32, 32), (17, 90), (120, 31)], ids=str)
def test_any_image_keeps_its_size_and_mode_without_warnings(kind, size, recwarn):
    image = scene(*size, seed=1)
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        for severity in range(1, 6):
            found = corrupt(image, kind, severity, seed=3)
            assert found.size == size and found.mode == "RGB"
    assert not [w for w in recwarn.list if issubclass(w.category, RuntimeWarning)]  # not those of other tests' garbage


@pytest.mark.parametrize("kind", KINDS)
def test_constant_images_stay_in_range(kind):
    """They have no contrast, and no largest channel (black) or one that cannot increase (white)."""
    for level in (0, 128, 255):
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            found = array(corrupt(Image.new("RGB", (40, 30), (level,) * 3), kind, 3, seed=0))
        if kind not in COLOURED:
            assert np.ptp(found, axis=-1).max() <= 1.5 / 255
        if kind.endswith("blur") or kind in {"contrast", "pixelate", "elastic_transform", "jpeg_compression"}:
            assert np.abs(found - level / 255).max() <= 2.5 / 255


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_depends_on_the_seed_only(kind):
    image = scene(48, 40, seed=2)
    kept = image.tobytes()

    def made(state: int, seed: int) -> bytes:
        random.seed(state), np.random.seed(state), torch.manual_seed(state)  # noqa: NPY002
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
        found = corrupt(image, kind, 3, seed).tobytes()
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
        assert torch.equal(torch.get_rng_state(), before[2])
        return found

    assert made(0, seed=5) == made(1, seed=5) != kept
    assert (made(0, seed=6) == made(0, seed=5)) == (kind in FIXED)
    assert image.tobytes() == kept


@pytest.mark.parametrize("side", [32, 64, 224])
@pytest.mark.parametrize("kind", KINDS)
def test_more_severe_is_farther_from_the_original(kind, side):
    images = pictures(side)[:: 3 if side == 224 else 1]
    distance = [
        np.mean([np.square(array(corrupt(x, kind, severity, k)) - array(x)).mean() for k, x in enumerate(images)])
        for severity in range(1, 6)
    ]
    assert distance[0] > 1e-4
    assert (np.diff(distance) > 0).all(), distance


@pytest.mark.parametrize("kind", ["defocus_blur", "zoom_blur", "glass_blur", "motion_blur", "pixelate"])
def test_lengths_are_scaled_with_the_image(kind):
    """An enlarged image, corrupted and shrunk again, differs from the original as much as one corrupted at 224 pixels."""
    small = scene(224, 224, seed=4)
    large = small.resize((672, 672), Image.Resampling.BICUBIC)
    seen = array(corrupt(large, kind, 5, seed=1).resize((224, 224), Image.Resampling.BOX))
    damage = np.square(array(corrupt(small, kind, 5, seed=1)) - array(small)).mean()
    assert 0.6 < np.square(seen - array(small)).mean() / damage < 1.4


def test_noise_has_the_given_strength():
    grey = Image.new("RGB", (200, 200), (102, 102, 102))  # 0.4
    assert array(corrupt(grey, "gaussian_noise", 1, 0)).std() == pytest.approx(0.08, rel=0.02)
    assert array(corrupt(grey, "shot_noise", 1, 0)).std() == pytest.approx((0.4 / 60) ** 0.5, rel=0.02)
    hit = array(corrupt(grey, "impulse_noise", 5, 0))
    assert (hit == 0).mean() == pytest.approx(0.135, abs=0.005) and (hit == 1).mean() == pytest.approx(0.135, abs=0.005)
    assert np.unique(hit).size == 3


def test_contrast_and_brightness_equal_their_equations():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    x = array(image)
    mean = x.mean((0, 1))
    np.testing.assert_allclose(array(corrupt(image, "contrast", 3, 0)), mean + 0.2 * (x - mean), atol=0.51 / 255)
    for before, after in zip(x.reshape(-1, 3), array(corrupt(image, "brightness", 2, 0)).reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before)
        np.testing.assert_allclose(after, colorsys.hsv_to_rgb(hue, saturation, min(value + 0.2, 1)), atol=0.51 / 255)
    black = Image.new("RGB", (3, 3))
    assert set(corrupt(black, "brightness", 2, 0).tobytes()) == {51}


@pytest.mark.parametrize("severity", range(1, 6))
def test_fog_is_between_the_darkest_and_the_brightest_pixel(severity):
    """It takes the brightest pixel's place at its thickest, and nothing saturates."""
    image = scene(48, 48, seed=7).point(lambda level: 60 + level // 3)
    found, (low, high) = array(corrupt(image, "fog", severity, 0)), (array(image).min(), array(image).max())
    assert low * high / (high + 3.5) - 0.01 < found.min() and found.max() <= high + 0.51 / 255
    assert found.std() > 0.01


def test_pixelate_leaves_blocks():
    found = array(corrupt(scene(80, 40, seed=5), "pixelate", 5, 0))
    blocks = found.reshape(10, 4, 20, 4, 3)
    assert (blocks == blocks[:, :1, :, :1]).all() and np.ptp(found) > 0.1


def test_jpeg_is_that_of_pillow():
    image, file = scene(40, 40, seed=6), io.BytesIO()
    image.save(file, "JPEG", quality=7)
    assert corrupt(image, "jpeg_compression", 5, 0).tobytes() == Image.open(file).convert("RGB").tobytes()


def test_blurs_smooth_and_keep_the_mean():
    image = scene(96, 96, seed=7)
    x = array(image)
    for kind in ("defocus_blur", "motion_blur", "zoom_blur"):
        found = array(corrupt(image, kind, 4, 0))
        assert np.abs(np.diff(found, axis=1)).mean() < 0.8 * np.abs(np.diff(x, axis=1)).mean()
        assert np.abs(found.mean((0, 1)) - x.mean((0, 1))).max() < 0.03


def test_convolution_equals_the_direct_sum():
    draw = np.random.default_rng(8)
    x, kernel = draw.random((9, 7, 3)), draw.random((5, 5))
    wide = np.pad(x, ((2, 2), (2, 2), (0, 0)), "symmetric")
    brute = sum(kernel[i, j] * wide[4 - i : 13 - i, 4 - j : 11 - j] for i in range(5) for j in range(5))
    np.testing.assert_allclose(_convolve(x, kernel), brute, atol=1e-12)


def test_a_kernel_has_the_weight_and_mean_of_its_points():
    kernel = _kernel(np.array([0.25, -1.5]), np.array([0.0, 2.0]), np.array([1.0, 3.0]))
    half = len(kernel) // 2
    rows, columns = np.indices(kernel.shape) - half
    assert kernel.sum() == pytest.approx(1) and kernel[half, half] == pytest.approx(0.75 / 4)
    assert [(rows * kernel).sum(), (columns * kernel).sum()] == pytest.approx([(0.25 - 4.5) / 4, 1.5])


def test_sampling_reads_at_the_shifted_positions():
    x = np.random.default_rng(9).random((6, 5, 3)).astype(np.float32)
    shift = np.zeros((2, 6, 5))
    np.testing.assert_array_equal(_sample(x, shift), x)
    shift[0], shift[1] = 1, -0.5
    expected = (x[[1, 2, 3, 4, 5, 5]][:, [0, 0, 1, 2, 3]] + x[[1, 2, 3, 4, 5, 5]][:, [0, 1, 2, 3, 4]]) / 2
    np.testing.assert_allclose(_sample(x, shift), expected, atol=1e-6)


def test_frost_is_thickest_at_the_border_and_snow_covers_more_and_more():
    black = Image.new("RGB", (224, 224))
    ice = np.mean([array(corrupt(black, "frost", 5, seed)) for seed in range(8)], axis=0)
    assert ice[:20].mean() > 1.3 * ice[90:134, 90:134].mean() > 0.1
    white = [np.mean(array(corrupt(black, "snow", severity, 0))) for severity in range(1, 6)]
    assert (np.diff(white) > 0).all() and 0.1 < white[0] < white[-1] < 0.6


def test_unknown_corruptions_are_errors():
    image = Image.new("RGB", (4, 4))
    with pytest.raises(FedvlmError, match="did you mean defocus_blur"):
        corrupt(image, "defocusblur", 1, 0)
    with pytest.raises(FedvlmError, match=r"severity=6.*1, 2, 3, 4, 5"):
        corrupt(image, "fog", 6, 0)
    with pytest.raises(FedvlmError, match="severity=0"):
        corrupt(image, "fog", 0, 0)
    with pytest.raises(FedvlmError, match="mode is L"):
        corrupt(image.convert("L"), "fog", 1, 0)


@pytest.mark.parametrize("engine", ["serial", "loopback"])
def test_a_run_records_the_accuracy_on_corrupted_images(engine, images, tmp_path, bytes_only):
    """Compared with the shared model on every corrupted version of every test image, computed here."""
    given = {"data": str(images), "corrupt": 2, "rounds": 1, "unseen": "noto", "engine": engine}
    setup = resolve("fedot", given)
    pool = Pools().load(setup)
    run = train.train(PlannedRun(setup, pool, tmp_path / "run"))
    last, (state, _) = run.record.finished.last, run.load()
    planned = PlannedRun(setup, pool)
    method, federation = planned.method, planned.federation
    model, params = load("mini-clip"), method.shared_model(state.message())
    for view, clients in (("newcomer", federation.unseen), ("shared", federation.seen)):
        shares = []
        for i in clients:
            low, high = federation.data.bounds[i, 2:]
            right = []
            for k in federation.items[low:high]:
                item = pool.source.items[k]
                data = (images / item.path).read_bytes()
                versions = [corrupted(digest(data), v)[1](decode(data)) for v in range(2)]
                guess = method.model.logits(params, model.images(versions)[None])[0].argmax(-1)
                right += (guess == pool.task.classes.index(item.label)).tolist()
            shares.append(np.mean(right))
        assert last[view]["corrupted"] == pytest.approx(np.mean(shares), abs=1e-6)
    assert last["cacc"] == last["personal"]["corrupted"]


def test_versions_are_all_different_corruptions():
    key = digest(b"an image")
    assert len({corrupted(key, v)[0] for v in range(75)}) == 75
    with pytest.raises(FedvlmError, match="between 1 and 75"):
        with_corruptions(None, 76, None, "embedding", None)
