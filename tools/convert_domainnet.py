"""DomainNet (Peng et al., 2019) by its official lists: DOMAIN_train.txt and DOMAIN_test.txt, lines of "path label", beside
the domains' folders, as domain/class/image.

Only the classes asked for are copied, by default the ten of FedBN (Li et al., 2021), which FFT-GP and FOCoOp use.

python tools/convert_domainnet.py domainnet domainnet-10
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from converting import parser, run

from fedvlm.errors import FedvlmError, nearest

CLASSES = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
LIST = re.compile(r"(\w+)_(train|test)\.txt")
PARTS = ("train", "test")


def convert(source: Path, out: Path, classes: Collection[str] = (), only: str = "") -> str:
    """Writes the folder `out` and says what it holds. only: train or test; "": both."""
    lists = sorted(p for p in source.glob("*.txt") if (m := LIST.fullmatch(p.name)) and only in ("", m[2]))
    if not lists:
        raise FedvlmError(f"{source}: no DOMAIN_train.txt or DOMAIN_test.txt; give the folder with DomainNet's lists")
    entries = [path for file in lists for path in _paths(file)]
    wanted, known = set(classes or CLASSES), {path.parts[1] for path in entries}
    if unknown := sorted(wanted - known):
        raise FedvlmError(f"--classes {unknown[0]}: no such class in the lists; {nearest(unknown[0], known)}")
    count = 0
    for path in (p for p in entries if p.parts[1] in wanted):
        image = (source / path).resolve()
        if not image.is_relative_to(source.resolve()) or not image.is_file():
            raise FedvlmError(f"{source / path}: no such image; unpack the domains' archives beside the lists")
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, target)
        count += 1
    return f"{count} images of {len(wanted)} classes in {len({p.parts[0] for p in entries})} domains"


def _paths(file: Path) -> list[PurePosixPath]:
    """The images of a list."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        path = PurePosixPath(line.rpartition(" ")[0])
        if line.strip() and (len(path.parts) != 3 or path.is_absolute() or ".." in path.parts):
            raise FedvlmError(f"{file}:{number}: '{line[:80]}' is not 'domain/class/image label'")
        if line.strip():
            found.append(path)
    return found


def main(words: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--classes", nargs="+", default=[], help="only these; none: FedBN's ten")
    options.add_argument("--only", default="", choices=PARTS, help="one of the two lists")
    return run(convert, options, words)


if __name__ == "__main__":
    sys.exit(main())
