"""Output on the screen: a progress bar in terminals and notebooks, plain lines elsewhere. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fedvlm.system.formatting import duration
from fedvlm.system.names import printable
from fedvlm.system.table import Table

WIDE = 240  # columns where the output is no terminal, so that nothing is cut
EVERY = 5.0  # seconds between two lines of progress where the output is no terminal
LONGEST_CELL = 4096  # characters, as the longest path
plain = partial(Console, highlight=False, markup=False, emoji=False)  # names and paths are shown as they are
out = plain(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else WIDE)
err = plain(stderr=True, soft_wrap=True)


class Update(Protocol):
    def __call__(self, done: int, words: str = "", total: int | None = None) -> None: ...


def shows_bars() -> bool:
    """Whether a progress bar can be drawn; in a notebook rich needs ipywidgets for it."""
    return out.is_terminal or (out.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


@contextlib.contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Update]:
    if shows_bars():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}", markup=False),
        )
        with Progress(*columns, TimeRemainingColumn(), console=out, transient=True) as bar:
            task = bar.add_task(printable(title), total=total, words="")

            def move(done: int, words: str = "", total: int | None = total) -> None:
                bar.update(task, completed=done, words=printable(words), total=total)

            yield move
    else:
        began = shown = time.monotonic()
        first: tuple[float, int] | None = None  # the first call: what came before it was preparation

        def say(done: int, words: str = "", total: int | None = total) -> None:
            nonlocal shown, first
            now, total = time.monotonic(), total or done
            first = first or (now, done)
            if now - shown >= EVERY or (done >= total and now - began >= EVERY):
                shown = now
                seconds, count = now - first[0], done - first[1]
                left = f"{duration(seconds / count * (total - done))} left" if count else ""
                print(" ".join(printable(f"{title} {done}/{total} {words} {left}").split()), flush=True)

        yield say


def line(text: str, style: str | None = None) -> None:
    """One line, whatever the names in it are."""
    out.print(printable(text), style=style)


def note(text: str) -> None:
    line(text, "dim")


def warn(text: str) -> None:
    """Print a warning to standard error."""
    err.print(printable(text), style="yellow")


def show(table: Table) -> None:
    table = replace(
        table,
        columns=[printable(c, LONGEST_CELL) for c in table.columns],
        rows=[{printable(c, LONGEST_CELL): printable(x, LONGEST_CELL) for c, x in row.items()} for row in table.rows],
        notes=[printable(n) for n in table.notes],
        bold={(printable(row, LONGEST_CELL), printable(c, LONGEST_CELL)) for row, c in table.bold},
        level={(printable(row, LONGEST_CELL), printable(c, LONGEST_CELL)) for row, c in table.level},
    )
    if not (out.is_terminal or out.is_jupyter):
        print(table)  # the whole of it, for files and pipes
        return
    grid = Grid(box=None, header_style="bold", pad_edge=False)
    columns = fitting(table)
    for column in columns:
        numeric = table.is_numeric(column)
        style = "dim" if column in table.dim else ""
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric, style=style)
    for row in table.rows:
        grid.add_row(*(Text(table.marked(row, c), "bold" if table.is_bold(row, c) else "") for c in columns))
    out.print(grid)
    for text in table.notes:
        note(text)


def fitting(table: Table) -> list[str]:
    """The columns that fit the width: the last ones are left out, at least four stay."""
    columns = list(table.columns)

    def width(column: str) -> int:
        cells, numeric = table.cells(column), table.is_numeric(column)
        return 2 + max(len(column), *(len(c) if numeric else min(len(c), 24) for c in cells), 0)

    while len(columns) > 4 and sum(map(width, columns)) > out.width:
        columns.pop()
    return columns


def rows(columns: list[str], lines: list[list[str]]) -> None:
    """Prints a plain table."""
    show(Table(columns, [dict(zip(columns, line, strict=True)) for line in lines]))
