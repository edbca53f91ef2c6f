"""Errors that the user can put right, and suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


class FedvlmError(Exception):
    """Something the user can put right; the command line shows it without a traceback."""


class BadMessage(FedvlmError):
    """What arrived from a client is not what was agreed."""


class Refused(FedvlmError):
    """What a site does not do, by its rules or the plan; the text says nothing of its data and may leave the site."""


class VoidRound(FedvlmError):
    """A round that leaves the shared model as it was."""


class NoQuorum(VoidRound):
    """Fewer clients answered than `quorum=` asks for."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """'did you mean …?' where one of the choices is close, otherwise the list of choices."""
    known = [str(c) for c in choices]
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return "there is " + ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
