"""Test accuracies of each method as a matrix: a row for each held-out target, a column for each tested domain."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from fedvlm.core.records import RunRecord
from fedvlm.evaluation.protocols import matrix_row, target
from fedvlm.report.tables import DASH, Groups

MOST_COLUMNS = 24  # of a matrix; wider ones are unreadable and left out


class Cell(NamedTuple):
    text: str
    heat: int  # 0 to 10 on the colour scale
    held_out: bool


class Matrix(NamedTuple):
    """Test accuracy of one method: a row per held-out target, a column per domain (or client)."""

    label: str
    names: list[str]
    rows: dict[str, list[Cell]]


def matrices(groups: Groups) -> list[Matrix]:
    """One matrix per method, all on one colour scale."""
    by_method = {label: accuracies(records) for label, records in groups.items()}
    known = [v for cells in by_method.values() for v, _ in cells.values() if not np.isnan(v)]
    low, span = (min(known), max(known) - min(known) or 1.0) if known else (0.0, 1.0)
    out = []
    for label, cells in by_method.items():
        names = sorted({name for _, name in cells})
        rows: dict[str, list[Cell]] = {held: [] for held in sorted({held for held, _ in cells})}
        for held, name in ((held, name) for held in rows for name in names):
            value, held_out = cells.get((held, name), (np.nan, False))
            heat = round(10 * float(np.nan_to_num((value - low) / span)))
            rows[held].append(Cell(percent_cell(value), heat, held_out))
        if 0 < len(names) <= MOST_COLUMNS:
            out.append(Matrix(label, names, rows))
    return out


def accuracies(records: list[RunRecord]) -> dict[tuple[str, str], tuple[float, bool]]:
    """(held-out target, tested domain) → test accuracy as mean over seeds, and whether that domain was held out."""
    cells: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for record in records:
        for name, entry in matrix_row(record).items():
            cells[target(record), name].append(entry)
    return {key: (float(np.mean([v for v, _ in found])), found[0][1]) for key, found in cells.items()}


def percent_cell(value: float | None) -> str:
    return DASH if value is None or np.isnan(value) else f"{100 * value:.1f}"
