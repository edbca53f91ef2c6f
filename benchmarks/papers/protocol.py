"""What the numbers of a table mean, row by row: split, images, model, weights of clients, optimiser and rate.

A manifest says its `protocol` once and lists in `own` the methods that have settings of their own, each with the reason. A
table's column has one meaning where all rows that train agree in MEANING; a row that differs says why (`why`), and the
printed table shows it. A key that every row of a table sets is what the table is about.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedvlm.config.config import Setup
from fedvlm.parts.registry import AXES

RUN = ("split", "unseen_split", "personal_split", "score", "shots", "bound", "rounds")
TRAINING = (
    "keep",
    "weights",
    "optimiser",
    "momentum",
    "weight_decay",
    "schedule",
    "lr",
    "batch",
    "epochs",
    "objective",
)
MEANING = (*RUN, *TRAINING)


def meaning(setup: Setup) -> dict[str, object]:
    """The keys of a row that decide what its numbers mean; {} of one that trains nothing but for the images it is scored
    on. A merge without weights of its own (`weights` is a setting of the mean) has none."""
    found = {k: getattr(setup.config, k) for k in RUN}
    if not setup.config.rounds:
        return {k: found[k] for k in ("split", "unseen_split", "score")}
    parts = [setup.parts[axis].settings for axis in AXES]
    return found | {k: p[k] for p in parts for k in TRAINING if k in p}


def shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing(rows: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, list[str]]]:
    """By key, the values of rows that do not agree, and whose they are."""
    found: dict[str, dict[str, list[str]]] = {}
    for key in MEANING:
        for title, known in rows.items():
            if key in known:
                found.setdefault(key, {}).setdefault(shown(known[key]), []).append(title)
    return {key: values for key, values in found.items() if len(values) > 1}


def unlike(
    rows: Mapping[str, Mapping[str, object]], subject: set[str], special: Collection[str] = ()
) -> dict[str, dict[str, str]]:
    """Of each row, the keys in which it differs from most rows, with its values; without those that the table is about. Rows
    that have a reason to differ (`special`) do not decide what most rows have."""
    found: dict[str, dict[str, str]] = {}
    for key, values in differing(rows).items():
        usual = max(values, key=lambda v: sum(title not in special for title in values[v]))
        for value, titles in values.items() if key not in subject else ():
            for title in titles if value != usual else ():
                found.setdefault(title, {})[key] = value
    return found
