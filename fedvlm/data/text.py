"""Text as a federation: who said it is a client, and every example is 80 characters and the one that follows.

A file of one JSON object a line, {"play", "role", "text"} or {"role", "text"} (gzip or plain). A role's text is cut into
blocks, and examples never cross from one into another: a whole block is train, val or test, so that no character that
is tested on was read in training. The alphabet is fixed: nothing is learned about it from anybody's text.
"""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
from pathlib import Path

import numpy as np

from fedvlm.core import FedvlmError
from fedvlm.data.source import Item, Source, drawn
from fedvlm.tasks import CHARACTERS

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
ALPHABET = "\n !\"&'(),-.0123456789:;>?[]" + LETTERS  # LEAF's, but for a brace
PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-", "…": "."})
WINDOW = 80  # characters in
BLOCK = 400  # characters that stay on one side of a split; a short text has five blocks all the same


def tokens(text: str) -> np.ndarray:
    """Places in the alphabet; accents are dropped and what is left unknown is a space."""
    place = {c: k for k, c in enumerate(ALPHABET)}
    bare = (c for c in unicodedata.normalize("NFKD", text.translate(PLAIN)) if not unicodedata.combining(c))
    return np.array([place.get(c, place[" "]) for c in bare], np.uint8)


def open_text(path: Path, domains: int, stride: int) -> Source:
    if stride < 1:
        raise FedvlmError(f"stride={stride} must be at least 1: the characters from one example to the next")
    said = _read(path)
    items, rows = [], []
    for role in sorted(drawn(said, domains)):
        found = tokens(said[role])
        size = max(WINDOW + 1, min(BLOCK, len(found) // 5))
        for block, first in enumerate(range(0, len(found) - size + 1, size)):
            inside = found[first : first + size]
            for at in range(0, size - WINDOW, stride):
                rows.append(inside[at : at + WINDOW])
                items.append(Item(f"{role}#{first + at}", role, ALPHABET[inside[at + WINDOW]], f"{role}#{block}"))
    if not items:
        raise FedvlmError(f"data={path}: nobody says more than {WINDOW} characters")
    return Source(path.name.split(".")[0], path, tuple(items), CHARACTERS, tokens=np.stack(rows))


def _read(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise FedvlmError(f"data={path}: no such file")
    said: dict[str, str] = {}
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                entry = json.loads(line)
                who = "-".join(str(entry[k]) for k in ("play", "role") if k in entry)
                who = re.sub(r"[^\w-]+", "-", who).strip("-") or "nobody"  # clients' names become folders
                said[who] = said.get(who, "") + str(entry["text"])
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise FedvlmError(
            f'data={path}: line {max(1, number)} is not {{"role": …, "text": …}} ({type(error).__name__})'
        ) from error
    if not said:
        raise FedvlmError(f"data={path} is empty")
    return said
