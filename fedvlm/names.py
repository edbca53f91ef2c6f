"""Names of clients and classes as names of files, on every operating system."""

from __future__ import annotations

import hashlib
import re

RESERVED = {"con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(1, 10))}  # on Windows
LONGEST = 100


def file_name(name: str) -> str:
    """The name itself where every system takes it; otherwise a readable form with a hash, so that two names never meet."""
    plain = re.sub(r"[^\w.+ -]+", "_", name).strip(" .")
    safe = plain == name and 0 < len(name) <= LONGEST and name.lower().split(".")[0] not in RESERVED
    if safe:
        return name
    mark = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{plain[:LONGEST].strip(' .') or 'client'}-{mark}"
