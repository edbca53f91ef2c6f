"""A .jsonl or .jsonl.gz file of texts, {role, text} in each line: each role is a domain.

An example is 80 characters with the next character as its class.

The file has one JSON object per line, {"play", "role", "text"} or {"role", "text"} (gzip or plain). A role's text is cut
into blocks. Examples never span two blocks, and a block is one group of the split: no character that is tested on was
read in training. The alphabet is fixed, so nothing is learned about it from the text.
"""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedvlm.core.tasks import NEXT_CHARACTER
from fedvlm.data.format import Format, Options
from fedvlm.data.source import MAX_ITEMS, Item, Source, digest, sample_domains
from fedvlm.errors import FedvlmError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
ALPHABET = "\n !\"&'(),-.0123456789:;>?[]" + LETTERS  # LEAF's, without the brace
ASCII_PUNCTUATION = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-", "…": "."})
WINDOW = 80  # input characters of an example
BLOCK = 400  # characters per block; shorter where a text would have fewer than five blocks
MAX_BYTES = 1 << 28  # of a file, unpacked


def tokens(text: str) -> np.ndarray:
    """The index of each character in the alphabet; accents are dropped, other unknown characters become spaces."""
    position = {c: k for k, c in enumerate(ALPHABET)}
    characters = unicodedata.normalize("NFKD", text.translate(ASCII_PUNCTUATION))
    return np.array([position.get(c, position[" "]) for c in characters if not unicodedata.combining(c)], np.uint8)


class Text(Format):
    def recognises(self, name: str) -> bool:
        return name.endswith((".jsonl", ".jsonl.gz"))

    def open(self, name: str, options: Options) -> Source:
        return open_text(Path(name).expanduser(), options.domains, options.stride, options.keep)


def open_text(path: Path, domains: int, stride: int, keep: Sequence[str] = ()) -> Source:
    """domains: how many roles are kept (0: all); stride: characters from the start of one example to the next."""
    if stride < 1:
        raise FedvlmError(f"stride={stride} must be at least 1: the characters from one example to the next")
    by_role = _read(path)
    items, rows = list[Item](), list[np.ndarray]()
    for role in sorted(sample_domains(by_role, domains, keep)):
        if len(items) > MAX_ITEMS:
            raise FedvlmError(f"data={path}: more than {MAX_ITEMS:,} examples; give a larger stride= or fewer domains=")
        text = tokens(by_role[role])
        size = max(WINDOW + 1, min(BLOCK, len(text) // 5))
        for number, start in enumerate(range(0, len(text) - size + 1, size)):
            block = text[start : start + size]
            for offset in range(0, size - WINDOW, stride):
                label = ALPHABET[block[offset + WINDOW]]
                rows.append(block[offset : offset + WINDOW])
                items.append(Item(f"{role}#{start + offset}", role, label, f"{role}#{number}"))
    if not items:
        raise FedvlmError(f"data={path}: no speaker has more than {WINDOW} characters")
    return Source(path.name.split(".")[0], path, tuple(items), NEXT_CHARACTER, tokens=np.stack(rows))


def _read(path: Path) -> dict[str, str]:
    """Role → all of its text. The play is part of the role's name where there is one."""
    if not path.is_file():
        raise FedvlmError(f"data={path}: no such file")
    by_role: dict[tuple[str, ...], list[str]] = {}
    number, left = 0, MAX_BYTES
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            while line := lines.readline(left + 1):
                number, left = number + 1, left - len(line)
                if left < 0:
                    raise FedvlmError(f"data={path}: more than {MAX_BYTES:,} bytes of text (line {number}); split it")
                entry = json.loads(line.decode())
                role = tuple(str(entry[k]) for k in ("play", "role") if k in entry)
                by_role.setdefault(role, []).append(str(entry["text"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FedvlmError(
            f'data={path}: line {max(1, number)} is not {{"role": …, "text": …}} ({type(error).__name__})'
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise FedvlmError(f"data={path}: cannot be read after line {number} ({error})") from error
    if not by_role:
        raise FedvlmError(f"data={path} is empty")
    return {name: "".join(by_role[role]) for role, name in client_names(by_role).items()}


def client_names(roles: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Role → name of the client: letters, digits and hyphens, and a hash where several roles would get the same name."""
    plain = {role: re.sub(r"[^\w-]+", "-", "-".join(role)).strip("-") or "nobody" for role in roles}
    count = Counter(plain.values())
    mark = {role: digest(json.dumps(role).encode()).hex()[:8] for role in plain}
    return {role: name if count[name] == 1 else f"{name}-{mark[role]}" for role, name in plain.items()}
