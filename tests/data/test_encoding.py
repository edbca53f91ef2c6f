"""From files to stored rows: the same bits however images are prepared, cut into pieces and spread over threads."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from colours import Colours, expected, small_store, write_images
from PIL import Image
from torch import Tensor

from fedvlm import backbones
from fedvlm.backbones.arithmetic import arithmetic
from fedvlm.backbones.base import in_precision
from fedvlm.backbones.hf import Clip
from fedvlm.config.config import resolve
from fedvlm.data import encoding, store
from fedvlm.data.sample import at_pace
from fedvlm.data.source import decode, open_source
from fedvlm.system import timing


@pytest.fixture(scope="module")
def clip() -> Clip:
    found = backbones.load("mini-clip")
    assert isinstance(found, Clip)
    return found


def pictures(count: int) -> list[Image.Image]:
    draw = np.random.default_rng(0)
    sizes = draw.integers(20, 300, (count, 2))
    return [Image.fromarray(draw.integers(0, 256, (h, w, 3), np.uint8)) for h, w in sizes.tolist()]


def test_pixels_and_their_table_are_what_the_processor_gives(clip):
    for image in pictures(6):
        made = clip.prepare(image, "raw")
        assert isinstance(made, Tensor) and made.dtype == torch.uint8
        wanted = clip.processor([image])
        assert torch.equal(clip.pixels([made]), wanted)
        assert torch.equal(clip.processor.gathered(made[None]), wanted)
        assert torch.equal(clip.encode([image], "pixels")[0], made)


def test_threads_and_pieces_change_no_bit(clip, tmp_path, monkeypatch):
    small_store(tmp_path, monkeypatch)
    monkeypatch.setattr(encoding, "BATCH", 24)
    folder = tmp_path / "pets"
    for k, image in enumerate(pictures(26)):
        (folder / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        image.save(folder / "ab"[k % 2] / f"{k}.png")
    source = open_source(str(folder))
    before = torch.get_num_threads()
    found, *_ = store.features(source, clip, view="raw")
    assert torch.get_num_threads() == before
    images = [decode(data) for _, data in source.read()]
    assert torch.equal(found, clip.embeddings(images))
    assert torch.equal(found, torch.cat([clip.embeddings([image]) for image in images]))


class InThreads(Colours):
    """Says which threads call it, and with how many images."""

    safe_in_threads, device = True, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, str]] = []

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        self.calls.append((torch.get_num_threads(), threading.current_thread().name))
        return super().images(images)


def test_one_thread_loads_the_model_and_then_several_compute_with_a_core_each(tmp_path, monkeypatch):
    small_store(tmp_path, monkeypatch)
    monkeypatch.setattr(encoding, "PIECE", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda known=torch.get_num_threads: max(2, known()))
    source, model = open_source(str(write_images(tmp_path / "pets", 22))), InThreads()
    found, *_ = store.features(source, model)
    assert torch.equal(found, expected(source)) and set(model.batches) == {2}
    names = [name for _, name in model.calls]
    assert names[0] == "MainThread" and all(n.startswith("encode") for n in names[1:])


def test_an_error_of_the_encoder_ends_its_threads(tmp_path, monkeypatch):
    small_store(tmp_path, monkeypatch)

    class Broken(InThreads):
        def images(self, images: Sequence[Image.Image]) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("no memory")
            return super().images(images)

    with pytest.raises(store.FedvlmError, match="no memory"):
        store.features(open_source(str(write_images(tmp_path / "pets", 22))), Broken())
    assert not [t for t in threading.enumerate() if t.name.startswith("encode")]


def test_rows_of_less_precision_are_stored_apart(clip, tmp_path, monkeypatch):
    cache = small_store(tmp_path, monkeypatch)
    source = open_source(str(write_images(tmp_path / "pets", 6)))
    full, *_ = store.features(source, clip)
    half, *_ = store.features(source, in_precision(clip, "half"))
    assert not torch.equal(full, half) and torch.allclose(full, half, atol=0.05)
    assert half.dtype == torch.float32 and torch.allclose(half.norm(dim=-1), torch.ones(6))
    mark = arithmetic().mark
    names = sorted(p.name.removeprefix(f"mini-clip-{clip.fingerprint[:12]}-") for p in cache.iterdir())
    assert names == [f"raw-{mark}", f"raw-half-{mark}"]
    assert torch.equal(store.features(source, clip)[0], full)


def test_a_backbone_with_a_precision_of_its_own_is_refused():
    with pytest.raises(store.FedvlmError, match=r"encode=half.*leave encode= out"):
        in_precision(Colours(), "half")


def test_a_precision_that_is_not_the_usual_one_is_another_run():
    full, tf32, half = (resolve("fedavg", {"encode": p}).binding() for p in ("full", "tf32", "half"))
    assert full == resolve("fedavg", {}).binding() and "encode" not in full
    assert tf32["encode"] == "tf32" and half["encode"] == "half"


def test_phases_inside_others_count_once(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(timing, "perf_counter", lambda: float(next(ticks)))
    clock = timing.Clock()
    with clock.timed("load"):  # 0
        with clock.timed("import"):  # 1 to 2
            pass
        with clock.timed("import"):  # 3 to 4
            pass
    assert clock.taken() == {"import": 2.0, "load": 3.0} and clock.taken() == {}  # 5


def test_other_threads_are_not_timed():
    clock = timing.Clock()

    def work() -> None:
        with clock.timed("decode"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert clock.taken() == {}


def test_a_model_of_a_folder_is_read_once_as_long_as_its_files_stay(tmp_path):
    folder = tmp_path / "clip"
    shutil.copytree(backbones.ASSETS / "mini-clip", folder)
    first = backbones.load(str(folder))
    assert backbones.load(str(folder)) is first
    about = folder / "preprocessor_config.json"
    about.write_text(about.read_text().replace("0.48145466", "0.5"))
    assert backbones.load(str(folder)) is not first


def test_the_estimate_shares_cores_on_a_cpu_and_overlaps_on_a_gpu():
    assert at_pace(encoding.Pace(batch=64, piece=16, threads=2, decoders=1), decoding=1.0, encoding=3.0) == 2.0
    assert at_pace(encoding.Pace(batch=256, piece=256, threads=2, decoders=16), decoding=8.0, encoding=0.2) == 0.5
    assert at_pace(encoding.Pace(batch=64, piece=64, threads=0, decoders=2), decoding=1.0, encoding=3.0) == 3.0
