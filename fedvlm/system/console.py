"""Output on the screen: a progress bar in terminals and notebooks, plain lines elsewhere. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol, TextIO, cast

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fedvlm.system.formatting import duration
from fedvlm.system.names import printable
from fedvlm.system.table import Table

WIDE = 240  # columns where the output is no terminal, so that nothing is cut
EVERY = 5.0  # seconds between two lines of progress where the output is no terminal
SENTENCE = 24  # characters from which on a cell of words may be wrapped
LONGEST_CELL = 4096  # characters, as the longest path
plain = partial(Console, highlight=False, markup=False, emoji=False)  # names and paths are shown as they are
out = plain(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else WIDE)
err = plain(stderr=True, soft_wrap=True)


class Mode:
    """How a command was asked to print."""

    quiet = False  # results only: no progress, notes or warnings
    log: TextIO | None = None  # also written there, as plain lines
    collected: dict[str, object] | None = None  # JSON instead of text: what is printed at the end


def collect(name: str, value: object) -> None:
    """Adds something to the JSON; nothing where text is printed."""
    if Mode.collected is not None:
        Mode.collected[name] = value


def logged(text: str) -> None:
    if Mode.log is not None:
        Mode.log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        Mode.log.flush()


class Update(Protocol):
    def __call__(self, done: int, words: str = "", total: int | None = None) -> None: ...


def shows_bars() -> bool:
    """Whether a progress bar can be drawn; in a notebook rich needs ipywidgets for it."""
    return out.is_terminal or (out.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


@contextlib.contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Update]:
    if Mode.quiet or Mode.collected is not None:
        yield lambda done, words="", total=None: logged(f"{title} {done}/{total or done} {printable(words)}".strip())
    elif shows_bars():
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
                logged(f"{title} {done}/{total or done} {printable(words)}".strip())

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
                text = " ".join(printable(f"{title} {done}/{total} {words} {left}").split())
                print(text, flush=True)
                logged(text)

        yield say


def line(text: str, style: str | None = None) -> None:
    """One line, whatever the names in it are."""
    logged(printable(text))
    if Mode.collected is None:
        out.print(printable(text), style=style)


def note(text: str) -> None:
    if Mode.quiet:
        logged(printable(text))
    else:
        line(text, "dim")


def warn(text: str) -> None:
    """Print a warning to standard error."""
    logged(printable(text))
    if not Mode.quiet:
        err.print(printable(text), style="yellow")


def show(table: Table) -> None:
    """Prints the table; in a terminal, columns that do not fit stand in further blocks below, with the rows' names again."""
    table = replace(
        table,
        columns=[printable(c, LONGEST_CELL) for c in table.columns],
        titles={printable(c, LONGEST_CELL): printable(x, LONGEST_CELL) for c, x in table.titles.items()},
        rows=[{printable(c, LONGEST_CELL): printable(x, LONGEST_CELL) for c, x in row.items()} for row in table.rows],
        notes=[printable(n) for n in table.notes],
        head=[printable(n) for n in table.head],
        bold={(printable(row, LONGEST_CELL), printable(c, LONGEST_CELL)) for row, c in table.bold},
        level={(printable(row, LONGEST_CELL), printable(c, LONGEST_CELL)) for row, c in table.level},
    )
    logged(f"\n{table}")
    if Mode.collected is not None:
        rows = table.values or table.rows
        found = {"answer": table.head, "rows": rows, "notes": table.notes}
        cast("list[object]", Mode.collected.setdefault("tables", [])).append(found)
        return
    if not (out.is_terminal or out.is_jupyter):
        print(table)  # the whole of it, for files and pipes
        return
    for k, text in enumerate([*table.head, ""] if table.head else []):
        out.print(text, style=None if k else "bold")
    for k, columns in enumerate(folded(table, out.width)):
        if k:
            out.print()
        out.print(grid_of(table, columns))
    for text in table.notes:
        note(text)


def grid_of(table: Table, columns: list[str]) -> Grid:
    grid = Grid(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        numeric = table.is_numeric(column)
        style, narrowest = "dim" if column in table.dim else "", width_of(table, column)
        justify: Literal["right", "left"] = "right" if numeric else "left"
        title = table.title(column)
        grid.add_column(
            title, justify=justify, overflow="fold", no_wrap=numeric, style=style, min_width=min(narrowest, out.width)
        )
    for row in table.rows:
        grid.add_row(*(Text(table.marked(row, c), "bold" if table.is_bold(row, c) else "") for c in columns))
    return grid


def width_of(table: Table, column: str) -> int:
    """The least width of a column: numbers and words stay whole, sentences are wrapped."""
    cells = [table.title(column), *(table.marked(row, column) for row in table.rows)]
    if table.is_numeric(column):
        return max(map(len, cells))
    return max(min(max(map(len, cells)), SENTENCE), *(len(word) for cell in cells for word in cell.split()), 1)


def folded(table: Table, width: int) -> list[list[str]]:
    """The columns in blocks that fit, each with the first column."""
    first, *others = table.columns
    blocks, used = [[first]], width_of(table, first)
    for column in others:
        needed = 2 + width_of(table, column)
        if used + needed > width and len(blocks[-1]) > 1:
            blocks.append([first])
            used = width_of(table, first)
        blocks[-1].append(column)
        used += needed
    return blocks


def rows(columns: list[str], lines: list[list[str]]) -> None:
    """Prints a plain table."""
    show(Table(columns, [dict(zip(columns, line, strict=True)) for line in lines]))
