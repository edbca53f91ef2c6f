"""The fifteen common corruptions (Hendrycks and Dietterich 2019) at severities 1 to 5: noise, blur, weather and
compression, for the accuracy on corrupted images (CACC); and their four further ones (FURTHER), which are used by name
only (`fedvlm evaluate RUN corrupt=saturate`), so that corrupt=N stays what it was.

A reimplementation with numpy and Pillow. The strengths are those published for ImageNet-C, at 224 pixels. Lengths (blur
radii, shifts, flake sizes, distortions) are scaled by the image's short side/224, so that a model that resizes its
input sees the same corruption. Corruptions of single pixels (noise, brightness, contrast, JPEG) are not scaled: shrink
a large photograph to the model's resolution first. Differences from the original: glass_blur reads each pixel from a
random neighbour instead of swapping pixels in turn; frost is generated (ridges of noise, thickest at the border)
instead of pasted from photographs; snow, fog and elastic_transform have our own strengths, so that each severity is
farther from the original image than the one before (the published elastic_transform distorts the image more at
severities 1 and 2 than at 3 to 5). So results are comparable with each other, and only approximately with published
ones.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from fedvlm.core.seeds import numpy_generator
from fedvlm.errors import FedvlmError, nearest

Array = NDArray[np.floating]
Pixels = Array  # [height, width, 3], float32, 0 to 1
Draw = np.random.Generator
SIDE = 224  # image size for which the strengths are given


def corrupt(image: Image.Image, kind: str, severity: int, seed: int) -> Image.Image:
    """The corrupted image: the same bytes for the same image, kind, severity and seed. Give each image its own seed;
    all severities use the same random numbers, so that a higher one is a stronger version of a lower one."""
    if kind not in NAMES:
        raise FedvlmError(f"kind={kind}: no such corruption; {nearest(kind, NAMES)}")
    if severity not in range(1, 6):
        raise FedvlmError(f"severity={severity}: no such severity; {nearest(str(severity), '12345')}")
    if image.mode != "RGB":
        raise FedvlmError(
            f"corruptions need an RGB image, and this one's mode is {image.mode}; convert it with image.convert('RGB')"
        )
    pixels = np.asarray(image, dtype=np.float32) / 255
    scale = min(image.size) / SIDE
    made = (CORRUPTIONS | FURTHER)[kind]
    return _image(made(pixels, int(severity), scale, numpy_generator(seed, NAMES.index(kind))))


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
    """The mean of the image at magnifications from 1 to the largest."""
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
    flakes = np.float32(0.8) * (lumps > np.quantile(lumps, 1 - cover))
    streak = _streak(length, spread, scale, draw.uniform(np.pi / 4, 3 * np.pi / 4))
    layer = _convolve(flakes[..., None], streak)
    grey = x @ np.array([[0.299], [0.587], [0.114]], dtype=np.float32)
    dull: Pixels = keep * x + (1 - keep) * np.maximum(x, grey * 1.5 + 0.5)
    return dull + layer + layer[::-1, ::-1]


def frost(x: Pixels, strength: tuple[float, float], scale: float, draw: Draw) -> Pixels:
    """Ridges of noise at several sizes, which branch like ice crystals; thin in the middle and thick at the border."""
    image, ice = strength
    height, width = x.shape[:2]
    sizes = np.maximum(1, np.array([96, 48, 24, 12, 6]) * scale)
    ridges = [np.exp(-3 * np.abs(_noise((height, width), size, draw))) for size in sizes]
    veins = sum(ridge * 0.8**k for k, ridge in enumerate(ridges)) / sum(0.8**k for k in range(len(sizes)))
    down, right = (np.abs(np.linspace(-1, 1, n, dtype=np.float32)) if n > 1 else np.ones(1) for n in (height, width))
    border: Array = np.maximum(down[:, None], right) ** 2
    cover: Array = (veins * (0.7 + 0.9 * border))[..., None] * np.array([0.85, 0.95, 1.0], dtype=np.float32)
    return image * x + ice * cover.clip(0, 1)


def fog(x: Pixels, strength: tuple[float, float], scale: float, draw: Draw) -> Pixels:
    """Noise at ever smaller sizes, each divided by a higher power of `roughness`."""
    thick, roughness = strength
    sizes = SIDE * scale / 2.0 ** np.arange(8)
    layers = [_noise(x.shape[:2], size, draw) / roughness**k for k, size in enumerate(sizes) if k == 0 or size >= 1]
    cloud: Array = np.sum(layers, axis=0)
    cloud = (cloud - cloud.min()) / max(float(np.ptp(cloud)), 1e-6)
    brightest: np.floating = x.max()
    foggy: Pixels = (x + thick * cloud[..., None]) * brightest / (brightest + thick)
    return foggy


def brightness(x: Pixels, more: float, scale: float, draw: Draw) -> Pixels:
    """Added to the value in HSV space: the largest channel increases and the others keep their ratio to it."""
    value: Pixels = x.max(-1, keepdims=True)
    brighter: Pixels = np.minimum(value + more, 1)
    return np.where(value > 0, x * (brighter / np.maximum(value, 1e-6)), brighter)


def contrast(x: Pixels, share: float, scale: float, draw: Draw) -> Pixels:
    mean: Pixels = x.mean((0, 1), keepdims=True)
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
    share = share / max(1, scale)  # blocks grow with a large image; those of a small one do not shrink
    small = image.resize([max(1, int(n * share)) for n in image.size], Image.Resampling.BOX)
    return np.asarray(small.resize(image.size, Image.Resampling.NEAREST), dtype=np.float32) / 255


def jpeg_compression(x: Pixels, quality: int, scale: float, draw: Draw) -> Pixels:
    file = io.BytesIO()
    _image(x).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file), dtype=np.float32) / 255


def speckle_noise(x: Pixels, deviation: float, scale: float, draw: Draw) -> Pixels:
    return x + x * deviation * draw.standard_normal(x.shape, np.float32)


def gaussian_blur(x: Pixels, deviation: float, scale: float, draw: Draw) -> Pixels:
    return np.asarray(_image(x).filter(ImageFilter.GaussianBlur(deviation * scale)), dtype=np.float32) / 255


def spatter(x: Pixels, strength: tuple[float, float], scale: float, draw: Draw) -> Pixels:
    """Drops of mud: lumps of smooth noise cover a share of the image, in a dark brown."""
    cover, opacity = strength
    lumps = _noise(x.shape[:2], max(1, 12 * scale), draw) + 0.3 * _noise(x.shape[:2], max(1, 4 * scale), draw)
    drops: Pixels = opacity * (lumps > np.quantile(lumps, 1 - cover)).astype(np.float32)[..., None]
    return (1 - drops) * x + drops * np.array([0.25, 0.16, 0.08], dtype=np.float32)


def saturate(x: Pixels, factor: float, scale: float, draw: Draw) -> Pixels:
    """Multiply the distance of each channel from the largest by the factor, as in HSV space."""
    value: Pixels = x.max(-1, keepdims=True)
    stretched: Pixels = value - factor * (value - x)
    return stretched.clip(0, 1)


def _noise(shape: tuple[int, ...], size: float, draw: Draw) -> Pixels:
    """Smooth noise [height, width]: normal values at grid points `size` pixels apart, interpolated between them (where
    the standard deviation is smaller, about 0.7 on average)."""
    grid = draw.standard_normal([int(np.ceil(n / size)) + 1 for n in shape], np.float32)
    if size <= 1:
        return grid[: shape[0], : shape[1]]
    box = (0, 0, shape[1] / size, shape[0] / size)
    return np.asarray(Image.fromarray(grid).resize((shape[1], shape[0]), Image.Resampling.BICUBIC, box))


def _kernel(down: Array, right: Array, weight: Array) -> Array:
    """A blur kernel of weighted points, each distributed bilinearly over the four nearest pixels."""
    half = int(np.ceil(max(np.abs(down).max(), np.abs(right).max()))) + 1
    kernel = np.zeros((2 * half + 1, 2 * half + 1))
    row, column = np.floor(down).astype(int), np.floor(right).astype(int)
    for i in (0, 1):
        for j in (0, 1):
            near = np.abs(1 - i - (down - row)) * np.abs(1 - j - (right - column))
            np.add.at(kernel, (row + half + i, column + half + j), near * weight)
    normalised: Array = kernel / kernel.sum()
    return normalised


def _streak(length: float, spread: float, scale: float, angle: float) -> Array:
    """A blur kernel: one half of a normal density along a line."""
    along = np.linspace(0, length * scale, 8 + int(4 * length * scale))
    weight = np.exp(-(along**2) / (2 * (spread * scale) ** 2))
    return _kernel(along * np.sin(angle), along * np.cos(angle), weight)


def _convolve(x: Pixels, kernel: Array) -> Pixels:
    """The image, mirrored at its border, convolved with a square kernel; by FFT, since kernels are large."""
    half = len(kernel) // 2
    wide = np.pad(x, ((half, half), (half, half), (0, 0)), "symmetric")
    shape = wide.shape[:2]
    product = np.fft.rfft2(wide, axes=(0, 1)) * np.fft.rfft2(kernel.astype(x.dtype), shape)[..., None]
    return np.fft.irfft2(product, shape, axes=(0, 1))[2 * half :, 2 * half :].astype(x.dtype)


def _sample(x: Pixels, shift: Array) -> Pixels:
    """Each pixel read at its position plus `shift` [2, height, width], by bilinear interpolation."""
    height, width = x.shape[:2]
    down = (shift[0] + np.arange(height)[:, None]).clip(0, height - 1)
    right = (shift[1] + np.arange(width)).clip(0, width - 1)
    row, column = down.astype(np.intp), right.astype(np.intp)
    below: Array = (down - row).astype(np.float32)[..., None]
    beside: Array = (right - column).astype(np.float32)[..., None]
    flat, here = x.reshape(-1, 3), row * width + column
    under, next_to = (row < height - 1) * width, (column < width - 1) * 1
    top: Pixels = flat[here] + beside * (flat[here + next_to] - flat[here])
    bottom: Pixels = flat[here + under] + beside * (flat[here + under + next_to] - flat[here + under])
    return top + below * (bottom - top)


Strength = TypeVar("Strength")
Corruption = Callable[[Pixels, int, float, Draw], Pixels]  # of an image, severity, scale, random generator


def _severities(corruption: Callable[[Pixels, Strength, float, Draw], Pixels], *strengths: Strength) -> Corruption:
    """A corruption by severity 1, 2, … instead of strength."""
    return lambda x, severity, scale, draw: corruption(x, strengths[severity - 1], scale, draw)


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": _severities(gaussian_noise, 0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _severities(shot_noise, 60, 25, 12, 5, 3),
    "impulse_noise": _severities(impulse_noise, 0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": _severities(defocus_blur, 3, 4, 6, 8, 10),
    "glass_blur": _severities(glass_blur, (0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": _severities(motion_blur, (10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": _severities(zoom_blur, (1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": _severities(
        snow,  # share covered, flake size, length and deviation of its streak, share of the image kept
        (0.03, 3, 10, 4, 0.8),
        (0.06, 2, 12, 4, 0.7),
        (0.09, 4, 12, 8, 0.7),
        (0.12, 4.5, 12, 8, 0.65),
        (0.15, 2.5, 12, 12, 0.55),
    ),
    "frost": _severities(frost, (1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    "fog": _severities(fog, (1.5, 2), (2, 1.9), (2.5, 1.8), (3, 1.7), (3.5, 1.6)),
    "brightness": _severities(brightness, 0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _severities(contrast, 0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": _severities(
        elastic_transform, (0.8, 0.01), (1.2, 0.02), (1.6, 0.03), (2.1, 0.04), (2.8, 0.05)
    ),
    "pixelate": _severities(pixelate, 0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _severities(jpeg_compression, 25, 18, 15, 10, 7),
}
KINDS: tuple[str, ...] = tuple(CORRUPTIONS)
FURTHER: dict[str, Corruption] = {  # by name only; spatter and saturate have our own strengths
    "speckle_noise": _severities(speckle_noise, 0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": _severities(gaussian_blur, 1, 2, 3, 4, 6),
    "spatter": _severities(spatter, (0.08, 0.6), (0.14, 0.7), (0.2, 0.8), (0.28, 0.9), (0.36, 1)),
    "saturate": _severities(saturate, 1.5, 2.0, 3.0, 5.0, 10.0),
}
NAMES: tuple[str, ...] = (*KINDS, *FURTHER)
