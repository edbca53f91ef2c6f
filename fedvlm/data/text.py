"""Text as a data source: each role is a domain, and an example is 80 characters with the next character as its class.

The file has one JSON object per line, {"play", "role", "text"} or {"role", "text"} (gzip or plain). A role's text is cut
into blocks. Examples never span two blocks, and a block is one group of the split: no character that is tested on was
read in training. The alphabet is fixed, so nothing is learned about it from the text.
"""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
from pathlib import Path

import numpy as np

from fedvlm.core import FedvlmError
from fedvlm.data.source import Item, Source, sample_domains
from fedvlm.tasks import NEXT_CHARACTER

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
ALPHABET = "\n !\"&'(),-.0123456789:;>?[]" + LETTERS  # LEAF's, without the brace
ASCII_PUNCTUATION = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-", "…": "."})
WINDOW = 80  # input characters of an example
BLOCK = 400  # characters per block; shorter where a text would have fewer than five blocks


def tokens(text: str) -> np.ndarray:
    """The index of each character in the alphabet; accents are dropped, other unknown characters become spaces."""
    position = {c: k for k, c in enumerate(ALPHABET)}
    characters = unicodedata.normalize("NFKD", text.translate(ASCII_PUNCTUATION))
    return np.array([position.get(c, position[" "]) for c in characters if not unicodedata.combining(c)], np.uint8)


def open_text(path: Path, domains: int, stride: int) -> Source:
    """domains: how many roles are kept (0: all); stride: characters from the start of one example to the next."""
    if stride < 1:
        raise FedvlmError(f"stride={stride} must be at least 1: the characters from one example to the next")
    by_role = _read(path)
    items, rows = [], []
    for role in sorted(sample_domains(by_role, domains)):
        text = tokens(by_role[role])
        size = max(WINDOW + 1, min(BLOCK, len(text) // 5))
        for number, start in enumerate(range(0, len(text) - size + 1, size)):
            block = text[start : start + size]
            for offset in range(0, size - WINDOW, stride):
                label = ALPHABET[block[offset + WINDOW]]
                rows.append(block[offset : offset + WINDOW])
                items.append(Item(f"{role}#{start + offset}", role, label, f"{role}#{number}"))
    if not items:
        raise FedvlmError(f"data={path}: nobody says more than {WINDOW} characters")
    return Source(path.name.split(".")[0], path, tuple(items), NEXT_CHARACTER, tokens=np.stack(rows))


def _read(path: Path) -> dict[str, str]:
    """Role → all of its text. The play is part of the role's name where there is one."""
    if not path.is_file():
        raise FedvlmError(f"data={path}: no such file")
    by_role: dict[str, str] = {}
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                entry = json.loads(line)
                role = "-".join(str(entry[k]) for k in ("play", "role") if k in entry)
                role = re.sub(r"[^\w-]+", "-", role).strip("-") or "nobody"  # clients' names become folder names
                by_role[role] = by_role.get(role, "") + str(entry["text"])
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise FedvlmError(
            f'data={path}: line {max(1, number)} is not {{"role": …, "text": …}} ({type(error).__name__})'
        ) from error
    if not by_role:
        raise FedvlmError(f"data={path} is empty")
    return by_role
