"""The fifteen common corruptions (Hendrycks and Dietterich 2019), at severities 1 to 5: what a camera, the weather or a
file format does to a picture, for the accuracy on corrupted images (CACC).

Written anew with numpy and Pillow. Strengths are the published ones for ImageNet-C, at 224 pixels; whatever is a length
(blur radii, shifts, flakes, ripples) is scaled by the image's short side/224, so that a model that enlarges or shrinks
its input sees the same damage. What happens to each pixel by itself (noise, brightness, contrast, JPEG) is not scaled:
shrink a large photograph to the model's resolution first. Where ours is not the original: glass reads each pixel from a
random neighbour instead of swapping in turn; frost is drawn (ridges of noise, thickest at the border) instead of pasted
from photographs; snow, fog and elastic ripples have strengths of our own, so that each severity is farther from the
original than the one before (the originals' first two ripples warp the whole picture more than the other three). So
figures compare with each other, and only nearly with published ones.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from fedvlm.core import FedvlmError
from fedvlm.errors import nearest
from fedvlm.seeds import numpy_generator

Pixels = np.ndarray  # [height, width, 3], float32, 0 to 1
Draw = np.random.Generator
SIDE = 224  # where the strengths were given


def corrupt(image: Image.Image, kind: str, severity: int, seed: int) -> Image.Image:
    """The image, damaged: the same bytes for the same image, kind, severity and seed. Give each image its own seed;
    severities of one seed share their draws, so that more is more of the same."""
    if kind not in KINDS:
        raise FedvlmError(f"kind={kind}: no such corruption; {nearest(kind, KINDS)}")
    if severity not in range(1, 6):
        raise FedvlmError(f"severity={severity}: no such severity; {nearest(str(severity), '12345')}")
    if image.mode != "RGB":
        raise FedvlmError(
            f"corruptions need an RGB image, and this one's mode is {image.mode}; image.convert('RGB') first"
        )
    damage, strengths = DAMAGE[kind]
    pixels = np.asarray(image, dtype=np.float32) / 255
    scale = min(image.size) / SIDE
    return _image(damage(pixels, strengths[int(severity) - 1], scale, numpy_generator(seed, KINDS.index(kind))))


def _image(pixels: Pixels) -> Image.Image:
    return Image.fromarray((pixels * 255 + 0.5).clip(0, 255).astype(np.uint8))


def gaussian_noise(x: Pixels, deviation: float, scale: float, draw: Draw) -> Pixels:
    return x + deviation * draw.standard_normal(x.shape, np.float32)


def shot_noise(x: Pixels, photons: float, scale: float, draw: Draw) -> Pixels:
    return draw.poisson(x * photons).astype(np.float32) / photons


def impulse_noise(x: Pixels, share: float, scale: float, draw: Draw) -> Pixels:
    hit = draw.random(x.shape, np.float32)
    return np.where(hit < share, np.float32(0) + (hit < share / 2), x)


def defocus_blur(x: Pixels, radius: float, scale: float, draw: Draw) -> Pixels:
    across = np.linspace(-1, 1, 25) * radius * scale
    down, right = np.meshgrid(across, across)
    disk = np.hypot(down, right) <= radius * scale
    return _convolve(x, _kernel(down[disk], right[disk], np.ones(disk.sum())))


def glass_blur(x: Pixels, strength: tuple[float, float, int], scale: float, draw: Draw) -> Pixels:
    deviation, reach, times = strength
    blur = ImageFilter.GaussianBlur(deviation * scale)
    x = np.asarray(_image(x).filter(blur), dtype=np.float32) / 255
    for _ in range(times):
        x = _sample(x, reach * scale * draw.uniform(-1, 1, (2, *x.shape[:2])))
    return np.asarray(_image(x).filter(blur), dtype=np.float32) / 255


def motion_blur(x: Pixels, strength: tuple[float, float], scale: float, draw: Draw) -> Pixels:
    return _convolve(x, _streak(*strength, scale, draw.uniform(-np.pi / 4, np.pi / 4)))


def zoom_blur(x: Pixels, strength: tuple[float, float], scale: float, draw: Draw) -> Pixels:
    """The mean of the picture at magnifications from 1 to the strongest."""
    most, step = strength
    image, (height, width) = _image(x), x.shape[:2]
    total, zooms = x.copy(), np.arange(1, most, step)
    for zoom in zooms:
        right, down = width * (1 - 1 / zoom) / 2, height * (1 - 1 / zoom) / 2
        box = (right, down, width - right, height - down)
        total += np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box), dtype=np.float32) / 255
    return total / (len(zooms) + 1)


def snow(x: Pixels, strength: tuple[float, ...], scale: float, draw: Draw) -> Pixels:
    cover, flake, length, spread, keep = strength
    lumps = _noise(x.shape[:2], max(1, flake * scale), draw)
    layer = np.float32(0.8) * (lumps > np.quantile(lumps, 1 - cover))
    streak = _streak(length, spread, scale, draw.uniform(np.pi / 4, 3 * np.pi / 4))
    layer = _convolve(layer[..., None], streak)
    grey = x @ np.array([[0.299], [0.587], [0.114]], dtype=np.float32)
    dull = keep * x + (1 - keep) * np.maximum(x, grey * 1.5 + 0.5)
    return dull + layer + layer[::-1, ::-1]


def frost(x: Pixels, strength: tuple[float, float], scale: float, draw: Draw) -> Pixels:
    """Ridges of noise at several sizes branch like crystals; they are thin in the middle and thick at the border."""
    picture, ice = strength
    height, width = x.shape[:2]
    sizes = np.maximum(1, np.array([96, 48, 24, 12, 6]) * scale)
    ridges = [np.exp(-3 * np.abs(_noise((height, width), size, draw))) for size in sizes]
    veins = sum(ridge * 0.8**k for k, ridge in enumerate(ridges)) / sum(0.8**k for k in range(len(sizes)))
    down, right = (np.abs(np.linspace(-1, 1, n, dtype=np.float32)) if n > 1 else np.ones(1) for n in (height, width))
    border = np.maximum(down[:, None], right) ** 2
    cover = (veins * (0.7 + 0.9 * border))[..., None] * np.array([0.85, 0.95, 1.0], dtype=np.float32)
    return picture * x + ice * cover.clip(0, 1)


def fog(x: Pixels, strength: tuple[float, float], scale: float, draw: Draw) -> Pixels:
    """Cloud of noise at ever smaller sizes, each weaker than the last by the roughness."""
    thick, roughness = strength
    sizes = SIDE * scale / 2.0 ** np.arange(8)
    layers = [_noise(x.shape[:2], size, draw) / roughness**k for k, size in enumerate(sizes) if k == 0 or size >= 1]
    cloud = np.sum(layers, axis=0)
    cloud = (cloud - cloud.min()) / max(float(np.ptp(cloud)), 1e-6)
    most = x.max()
    return (x + thick * cloud[..., None]) * most / (most + thick)


def brightness(x: Pixels, more: float, scale: float, draw: Draw) -> Pixels:
    """Added to the value of hue, saturation, value: the largest channel grows and the others keep their ratio to it."""
    value = x.max(-1, keepdims=True)
    brighter = np.minimum(value + more, 1)
    return np.where(value > 0, x * (brighter / np.maximum(value, 1e-6)), brighter)


def contrast(x: Pixels, share: float, scale: float, draw: Draw) -> Pixels:
    mean = x.mean((0, 1), keepdims=True)
    return mean + share * (x - mean)


def elastic_transform(x: Pixels, strength: tuple[float, float], scale: float, draw: Draw) -> Pixels:
    ripple, stretch = strength
    height, width = x.shape[:2]
    shift = ripple * scale * np.stack([_noise((height, width), max(1, 6 * scale), draw) for _ in range(2)])
    matrix = stretch * draw.uniform(-1, 1, (2, 3))
    across = np.stack(np.broadcast_arrays(*np.ogrid[-0.5 : 0.5 : height * 1j, -0.5 : 0.5 : width * 1j], 0.5))
    return _sample(x, shift + SIDE * scale * np.tensordot(matrix, across, 1))


def pixelate(x: Pixels, share: float, scale: float, draw: Draw) -> Pixels:
    image = _image(x)
    share = share / max(1, scale)  # blocks of a large picture grow with it; a small one has no pixels to spare
    small = image.resize([max(1, int(n * share)) for n in image.size], Image.Resampling.BOX)
    return np.asarray(small.resize(image.size, Image.Resampling.NEAREST), dtype=np.float32) / 255


def jpeg_compression(x: Pixels, quality: int, scale: float, draw: Draw) -> Pixels:
    file = io.BytesIO()
    _image(x).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file), dtype=np.float32) / 255


def _noise(shape: tuple[int, ...], size: float, draw: Draw) -> np.ndarray:
    """Smooth noise in lumps of `size` pixels, of mean 0 and deviation 1 at their centres (and about 0.7 on average)."""
    grid = draw.standard_normal([int(np.ceil(n / size)) + 1 for n in shape], np.float32)
    if size <= 1:
        return grid[: shape[0], : shape[1]]
    box = (0, 0, shape[1] / size, shape[0] / size)
    return np.asarray(Image.fromarray(grid).resize((shape[1], shape[0]), Image.Resampling.BICUBIC, box))


def _kernel(down: np.ndarray, right: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted points, each shared out over the four pixels around it, so that a tenth of a pixel counts."""
    half = int(np.ceil(max(np.abs(down).max(), np.abs(right).max()))) + 1
    kernel = np.zeros((2 * half + 1, 2 * half + 1))
    row, column = np.floor(down).astype(int), np.floor(right).astype(int)
    for i in (0, 1):
        for j in (0, 1):
            near = np.abs(1 - i - (down - row)) * np.abs(1 - j - (right - column))
            np.add.at(kernel, (row + half + i, column + half + j), near * weight)
    return kernel / kernel.sum()


def _streak(length: float, spread: float, scale: float, angle: float) -> np.ndarray:
    """One side of a bell curve along a line."""
    along = np.linspace(0, length * scale, 8 + int(4 * length * scale))
    weight = np.exp(-(along**2) / (2 * (spread * scale) ** 2))
    return _kernel(along * np.sin(angle), along * np.cos(angle), weight)


def _convolve(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """The picture, mirrored at its border, with a square kernel: through Fourier, for kernels are large."""
    half = len(kernel) // 2
    wide = np.pad(x, ((half, half), (half, half), (0, 0)), "symmetric")
    shape = wide.shape[:2]
    product = np.fft.rfft2(wide, axes=(0, 1)) * np.fft.rfft2(kernel.astype(x.dtype), shape)[..., None]
    return np.fft.irfft2(product, shape, axes=(0, 1))[2 * half :, 2 * half :].astype(x.dtype)


def _sample(x: Pixels, shift: np.ndarray) -> Pixels:
    """Each pixel read from where `shift` [2, height, width] points, between pixels by straight lines."""
    height, width = x.shape[:2]
    down = (shift[0] + np.arange(height)[:, None]).clip(0, height - 1)
    right = (shift[1] + np.arange(width)).clip(0, width - 1)
    row, column = down.astype(np.intp), right.astype(np.intp)
    below, beside = (down - row).astype(np.float32)[..., None], (right - column).astype(np.float32)[..., None]
    flat, here = x.reshape(-1, 3), row * width + column
    under, next_to = (row < height - 1) * width, (column < width - 1) * 1
    top = flat[here] + beside * (flat[here + next_to] - flat[here])
    bottom = flat[here + under] + beside * (flat[here + under + next_to] - flat[here + under])
    return top + below * (bottom - top)


Damage = Callable[[Pixels, Any, float, Draw], Pixels]
DAMAGE: dict[str, tuple[Damage, tuple[Any, ...]]] = {
    "gaussian_noise": (gaussian_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (shot_noise, (60, 25, 12, 5, 3)),
    "impulse_noise": (impulse_noise, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (defocus_blur, (3, 4, 6, 8, 10)),
    "glass_blur": (glass_blur, ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": (motion_blur, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": (zoom_blur, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))),
    "snow": (
        snow,  # share covered, size of a flake, length and spread of its streak, share of the picture kept
        (
            (0.03, 3, 10, 4, 0.8),
            (0.06, 2, 12, 4, 0.7),
            (0.09, 4, 12, 8, 0.7),
            (0.12, 4.5, 12, 8, 0.65),
            (0.15, 2.5, 12, 12, 0.55),
        ),
    ),
    "frost": (frost, ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))),
    "fog": (fog, ((1.5, 2), (2, 1.9), (2.5, 1.8), (3, 1.7), (3.5, 1.6))),
    "brightness": (brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic_transform": (elastic_transform, ((0.8, 0.01), (1.2, 0.02), (1.6, 0.03), (2.1, 0.04), (2.8, 0.05))),
    "pixelate": (pixelate, (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": (jpeg_compression, (25, 18, 15, 10, 7)),
}
KINDS: tuple[str, ...] = tuple(DAMAGE)
