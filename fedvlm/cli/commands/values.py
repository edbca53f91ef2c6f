"""The `key=value` words of commands that have keys of their own."""

from __future__ import annotations

from collections.abc import Sequence

from fedvlm.config.config import key_values
from fedvlm.config.keys import Key, unknown
from fedvlm.core.records import Value


def values(keys: Sequence[Key], words: list[str]) -> dict[str, Value]:
    """Every key with its value; an error names a word that is none of them."""
    known = {k.name: k for k in keys}
    found = {k.name: k.default for k in keys}
    for key, value in key_values(words).items():
        if key not in known:
            raise unknown(key, known)
        found[key] = known[key].coerce(value)
    return found
