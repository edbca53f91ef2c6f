"""Random bytes of a machine's own: whoever knew them could subtract noise, or recognise data by their mark."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from fedvlm.system import files

FILE = "secret"  # in the home of a server or a site, and in a site's folder of a run


def secret(home: Path, purpose: str) -> bytes:
    """Different for each purpose, always the same; they never leave this machine."""
    path = home / FILE
    if not path.exists():
        files.write(path, secrets.token_bytes(32), private=True, sync=True)
    return hmac.digest(path.read_bytes(), purpose.encode(), "sha256")
