"""Names of clients, classes and files that others chose: as names of files on every operating system, and on a screen."""

from __future__ import annotations

import hashlib
import re

RESERVED = {"con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(1, 10))}  # on Windows
LONGEST = 100  # characters
LONGEST_BYTES = 200  # in UTF-8; most systems take 255, and endings and marks are added
SHOWN = 1000  # characters


def file_name(name: str) -> str:
    """The name itself where every system takes it; otherwise a readable form with a hash, so that two names never meet."""
    plain = re.sub(r"[^\w.+ -]+", "_", name).strip(" .")
    short = plain[:LONGEST].encode()[:LONGEST_BYTES].decode(errors="ignore").strip(" .")
    reserved = short.lower().split(".")[0].strip() in RESERVED  # whatever follows the dot
    if name and name == short and not reserved:
        return name
    mark = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{'_' * reserved}{short or 'client'}-{mark}"


def printable(text: object, limit: int = SHOWN) -> str:
    """The text on one line: line breaks become spaces, and other control characters, which could move a terminal's cursor
    or reverse the reading direction, question marks; a longer text loses its middle."""
    shown = "".join(" " if c.isspace() else c if c.isprintable() else "?" for c in str(text))
    if len(shown) <= limit:
        return shown
    head = limit // 2
    return f"{shown[:head]}…{shown[len(shown) - (limit - 1 - head) :]}"
