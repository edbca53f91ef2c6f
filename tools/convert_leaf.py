"""LEAF (Caldas et al., 2018): json files of users, each with inputs x and labels y.

Shakespeare's x are strings of 80 characters and y the next one: a role's text is put together again where its windows
overlap, and written as one line of a .jsonl. FEMNIST's x are 784 numbers in 0 … 1 and y a class of 62 (digits, upper and
lower case letters): each becomes an image in user/class/.

python tools/convert_leaf.py leaf/data/femnist/data femnist --classes 10
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from converting import parser, run
from PIL import Image

from fedvlm.errors import FedvlmError

CLASSES = [*"0123456789", *(f"upper {c}" for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")]
CLASSES += [f"lower {c}" for c in "abcdefghijklmnopqrstuvwxyz"]
SIDE = 28


def convert(source: Path, out: Path, users: Collection[str] = (), classes: int = 0, at_least: int = 1) -> str:
    """Writes `out` (a folder, or a .jsonl of texts) and says what it holds.

    users: only these; classes: only the first so many (10 are the digits); at_least: examples that a user must have."""
    kept = {u: d for u, d in _users(source) if (not users or u in users) and len(d["y"]) >= at_least}
    if missing := sorted(set(users) - kept.keys()):
        raise FedvlmError(f"{source}: no user {missing[0]} with {at_least} examples or more")
    if not kept:
        raise FedvlmError(f"{source}: no user with {at_least} examples or more")
    if all(isinstance(d["x"][0], str) for d in kept.values()):
        return _write_text(kept, out)
    return _write_images(kept, out, classes)


def _users(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each user's examples of all files (LEAF splits users over files, and examples over train and test)."""
    files = sorted(source.rglob("*.json")) if source.is_dir() else [source]
    if not files:
        raise FedvlmError(f"{source}: no .json file in it; give LEAF's data/NAME/data folder")
    joined: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            for user, data in json.loads(file.read_text(encoding="utf-8"))["user_data"].items():
                one = joined.setdefault(user, {"x": [], "y": []})
                one["x"] += data["x"]
                one["y"] += data["y"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedvlmError(
                f"{file}: not a file of LEAF ({error}); it has user_data with x and y of each user"
            ) from None
    yield from joined.items()


def _write_text(users: dict[str, dict[str, Any]], out: Path) -> str:
    if not out.name.endswith(".jsonl"):
        raise FedvlmError(f"{out}: texts go to a file that ends in .jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"role": user, "text": text_of(data["x"], data["y"])}) for user, data in users.items()]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{len(users)} roles"


def text_of(windows: list[str], following: list[str]) -> str:
    """The text of which these are windows with the character behind each; a gap starts a new line."""
    text = ""
    for window, character in zip(windows, following, strict=True):
        if text.endswith(window):
            text += character
        else:
            text += ("\n" if text else "") + window + character
    return text


def _write_images(users: dict[str, dict[str, Any]], out: Path, classes: int) -> str:
    count = 0
    for user, data in users.items():
        for k, (pixels, label) in enumerate(zip(data["x"], data["y"], strict=True)):
            if len(pixels) != SIDE * SIDE or not 0 <= int(label) < len(CLASSES):
                raise FedvlmError(f"user {user}: {len(pixels)} numbers of class {label}; FEMNIST has 784 of 62 classes")
            if classes and int(label) >= classes:
                continue
            folder = out / user / CLASSES[int(label)]
            folder.mkdir(parents=True, exist_ok=True)
            grey = np.rint(255 * np.clip(np.array(pixels, float).reshape(SIDE, SIDE), 0, 1)).astype(np.uint8)
            Image.fromarray(grey).save(folder / f"{k}.png")
            count += 1
    return f"{count} images of {len(users)} users"


def main(words: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--users", nargs="+", default=[], help="only these")
    options.add_argument("--classes", type=int, default=0, help="only the first so many; 10 are the digits")
    options.add_argument("--at-least", type=int, default=1, help="examples that a user must have")
    return run(convert, options, words)


if __name__ == "__main__":
    sys.exit(main())
