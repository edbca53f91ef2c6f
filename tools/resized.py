"""Images of a folder made small, such as outsiders for CIFAR-10, which would be told apart by their sharpness alone.

python tools/resized.py textures textures32 --size 32
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png")


def resized(source: Path, out: Path, size: int) -> int:
    """Writes each image at size × size, its middle square; returns how many."""
    found = [p for p in sorted(source.rglob("*")) if p.suffix.lower() in SUFFIXES]
    for path in found:
        with Image.open(path) as image:
            side = min(image.size)
            left, top = ((length - side) // 2 for length in image.size)
            small = image.convert("RGB").crop((left, top, left + side, top + side)).resize((size, size))
        target = (out / path.relative_to(source)).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        small.save(target)
    return len(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=32)
    args = parser.parse_args()
    print(f"{resized(args.source, args.out, args.size)} images in {args.out}")
