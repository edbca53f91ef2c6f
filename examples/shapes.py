"""Images for the other examples: shapes, drawn by each site in its own way, as site/class/number.png."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("circle", "square", "stripes")
EACH = 12  # images of each class for each site


def picture(label: int, brightness: int, rng: np.random.Generator) -> Image.Image:
    image = np.full((32, 32, 3), brightness)
    row, column = np.mgrid[:32, :32] - rng.integers(12, 20, (2, 1, 1))
    inside = [row**2 + column**2 < 80, np.maximum(abs(row), abs(column)) < 9, (row + column) % 8 < 4][label]
    image[inside] = rng.integers(140, 255, 3)
    noise = rng.integers(-90, 90, image.shape)
    return Image.fromarray(np.clip(image + noise, 0, 255).astype(np.uint8))


def write(folder: Path, sites: tuple[str, ...]) -> Path:
    """Files that are there are left as they are."""
    rng = np.random.default_rng(0)
    for number, site in enumerate(sites):
        for label, name in enumerate(CLASSES):
            (folder / site / name).mkdir(parents=True, exist_ok=True)
            for k in range(EACH):
                path = folder / site / name / f"{k:02}.png"
                if not path.exists():
                    picture(label, 60 * number, rng).save(path)
    return folder
