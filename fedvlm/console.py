"""What a person sees while something runs: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from fedvlm.evaluate.protocols import MEASURES
from fedvlm.report.tables import Table

WIDE = 240  # where nobody looks at a terminal, nothing has to be cut
out = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else WIDE)
err = Console(stderr=True, highlight=False, soft_wrap=True)
NUMERIC = re.compile(r"[\d\s.,+±–/-]*( [kMG]?B)?$")


class Update(Protocol):
    def __call__(self, done: int, words: str = "", total: int | None = None) -> None: ...


@contextlib.contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Update]:
    if out.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
        )
        with Progress(*columns, TimeRemainingColumn(), console=out, transient=True) as bar:
            task = bar.add_task(title, total=total, words="")

            def move(done: int, words: str = "", total: int | None = total) -> None:
                bar.update(task, completed=done, words=words, total=total)

            yield move
    else:
        began = shown = time.monotonic()

        def line(done: int, words: str = "", total: int | None = total) -> None:
            nonlocal shown
            now, total = time.monotonic(), total or done
            if now - shown >= 2 or (done >= total and now - began >= 2):
                shown = now
                left = (now - began) / max(done, 1) * (total - done)
                print(" ".join(f"{title} {done}/{total} {words} {left:.0f} s left".split()), flush=True)

        yield line


def words(record: dict[str, Any]) -> str:
    """A round in a few words."""
    parts = [f"loss {record['loss']:.3f}"] if record.get("loss") is not None else []
    parts += [f"{k} {100 * record[k]:.1f}" for k in (*MEASURES, "G", "P") if record.get(k) is not None]
    return " ".join([*parts, f"{(record['bytes_down'] + record['bytes_up']) / 1e6:.2f} MB/round"])


def show(table: Table) -> None:
    grid = Grid(box=None, header_style="bold", pad_edge=False)
    columns = fitting(table)
    for column in columns:
        numeric = all(NUMERIC.match(row.get(column, "")) for row in table.rows)
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    for row in table.rows:
        grid.add_row(*(escape(row.get(c, "")) for c in columns))
    out.print(grid)
    for note in table.notes:
        out.print(note, style="dim")


def fitting(table: Table) -> list[str]:
    """The columns that fit: rather fewer, from the left, than some cut short."""
    columns = list(table.columns)

    def wide(column: str) -> int:
        cells = [row.get(column, "") for row in table.rows]
        numeric = all(map(NUMERIC.match, cells))
        return 2 + max(len(column), *(len(c) if numeric else min(len(c), 24) for c in cells), 0)

    while len(columns) > 4 and sum(map(wide, columns)) > out.width:
        columns.pop()
    return columns


def rows(columns: list[str], lines: list[list[str]]) -> None:
    """A plain table."""
    show(Table(columns, [dict(zip(columns, line, strict=True)) for line in lines]))
