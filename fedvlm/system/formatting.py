"""Numbers with units, for people to read."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """1 round, 3 rounds."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def size(count: float) -> str:
    """Bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count else "0"


def duration(seconds: float) -> str:
    """0.3 s, 42 s, 5 min 20 s, 3 h 5 min, 12 h."""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 3570:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{round(seconds / 60)} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes and hours < 10 else f"{round(seconds / 3600)} h"


def six_digits(value: float) -> float:
    return float(f"{value:.6g}")
