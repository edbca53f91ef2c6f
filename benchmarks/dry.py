"""What `fedvlm run --dry` costs on a folder of 10,000 images: CPU-seconds of the command, from start to end.

    python benchmarks/dry.py [folder] [method]

Without a folder, 10,000 JPEGs of 64 × 64 pixels in 4 domains × 10 classes are written to a temporary one.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

COUNT, DOMAINS, CLASSES, SIDE = 10_000, 4, 10, 64


def write(root: Path) -> None:
    draw = np.random.default_rng(0)
    for k in range(COUNT):
        folder = root / f"domain-{k % DOMAINS}" / f"class-{k // DOMAINS % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((SIDE, SIDE)).save(folder / f"{k}.jpg")


def measure(folder: Path, method: str) -> None:
    command = [sys.executable, "-c", "from fedvlm.cli import main; raise SystemExit(main())"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        words = ["run", method, f"data={folder}", "--dry"]
        subprocess.run([*command, *words], check=True, env=os.environ | {"FEDVLM_CACHE": cache})
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{spent.ru_utime + spent.ru_stime:.1f} CPU-seconds, {time.perf_counter() - began:.1f} s by the clock")


if __name__ == "__main__":
    method = sys.argv[2] if len(sys.argv) > 2 else "fedot"
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]), method)
    else:
        with tempfile.TemporaryDirectory() as root:
            write(Path(root))
            measure(Path(root), method)
