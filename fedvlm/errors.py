"""Words for what went wrong."""

import difflib
from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str]) -> str:
    """«did you mean …?» where something is close, else what there is."""
    known = [str(c) for c in choices]
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return "there is " + ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
