"""A table of text, with the same rows as numbers. Imports nothing heavy: the console shows every table with it."""

from __future__ import annotations

import html
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedvlm.errors import FedvlmError

if TYPE_CHECKING:
    from pandas import DataFrame

NUMERIC = re.compile(r"[\d\s.,+±–/-]*(e[+-]\d+)?( [kMG]?B)?$")
Value = float | str | None  # of a row as numbers; None where there is no such value
SeedScores = dict[str, dict[int, float]]  # of a row: metric → seed → percent
ClientScores = dict[str, dict[str, float]]  # of a row: metric → client → percent, mean over runs
BEST, LEVEL = "*", "="  # marks behind cells


@dataclass
class Table:
    columns: list[str]
    rows: list[dict[str, str]]  # column → cell; a missing cell is empty
    notes: list[str] = field(default_factory=list)
    values: list[dict[str, Value]] = field(default_factory=list)  # the same rows as numbers (percent, MB, seconds)
    by_seed: dict[str, SeedScores] = field(default_factory=dict)  # by row; see gains.py
    bold: set[tuple[str, str]] = field(default_factory=set)  # (cell of the first column, column): the best
    level: set[tuple[str, str]] = field(default_factory=set)  # likewise: level with the highest
    by_client: dict[str, ClientScores] = field(default_factory=dict)  # by row
    warnings: list[str] = field(default_factory=list)  # of the notes, what to know before relying on the answer
    unlike: list[str] = field(default_factory=list)  # in what its rows differ, and so may not be compared
    dim: list[str] = field(default_factory=list)  # columns that the console prints in grey
    titles: dict[str, str] = field(default_factory=dict)  # of columns whose heading is not their name
    head: list[str] = field(default_factory=list)  # the answer, above the table

    def cells(self, column: str) -> list[str]:
        return [row.get(column, "") for row in self.rows]

    def title(self, column: str) -> str:
        return self.titles.get(column, column)

    def is_numeric(self, column: str) -> bool:
        return all(map(NUMERIC.match, self.cells(column)))

    def is_bold(self, row: dict[str, str], column: str) -> bool:
        return (row.get(self.columns[0], ""), column) in self.bold

    def marked(self, row: dict[str, str], column: str) -> str:
        """The cell with the mark of the best, or of a row that is level with it, in columns that have marks."""
        cell, place = row.get(column, ""), (row.get(self.columns[0], ""), column)
        if column not in {c for _, c in self.bold | self.level}:
            return cell
        return f"{cell} {BEST if place in self.bold else LEVEL if place in self.level else ' '}"

    def __str__(self) -> str:
        right = {c for c in self.columns if self.is_numeric(c)}
        marked = [{c: self.marked(row, c) for c in self.columns} for row in self.rows]
        lines = [{c: self.title(c) for c in self.columns}, *marked]
        widths = {c: max(len(row[c]) for row in lines) for c in self.columns}
        padded = [
            [row[c].rjust(widths[c]) if c in right else row[c].ljust(widths[c]) for c in self.columns] for row in lines
        ]
        head = [*self.head, ""] if self.head else []
        return "\n".join([*head, *("  ".join(cells).rstrip() for cells in padded), *self.notes])

    def _repr_html_(self) -> str:
        """The table as HTML, for notebooks."""
        right = {c for c in self.columns if self.is_numeric(c)}

        def cell(tag: str, column: str, text: str, bold: bool = False) -> str:
            align = "right" if column in right else "left"
            shown = f"<b>{html.escape(text)}</b>" if bold else html.escape(text)
            return f'<{tag} style="text-align: {align}">{shown}</{tag}>'

        head = "".join(cell("th", c, self.title(c)) for c in self.columns)
        body = ["".join(cell("td", c, row.get(c, ""), self.is_bold(row, c)) for c in self.columns) for row in self.rows]
        notes = [f"<p><small>{html.escape(note)}</small></p>" for note in self.notes]
        answer = [f"<p>{html.escape(text)}</p>" for text in self.head]
        rows = [f"<tr>{line}</tr>" for line in body]
        return "\n".join(
            [*answer, "<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *rows, "</tbody>", "</table>", *notes]
        )

    def to_pandas(self) -> DataFrame:
        """The rows as numbers, indexed by the first column; NaN where there is no value."""
        try:
            import pandas
        except ImportError:
            raise FedvlmError("a DataFrame needs pandas; install it with `pip install pandas`") from None
        rows = [{k: math.nan if v is None else v for k, v in row.items()} for row in self.values or self.rows]
        return pandas.DataFrame(rows, columns=None if rows else self.columns).set_index(self.columns[0])
