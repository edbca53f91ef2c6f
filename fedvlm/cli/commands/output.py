"""Tables on the screen and in files, as several commands print them."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedvlm import api
from fedvlm.api import Runs
from fedvlm.errors import FedvlmError
from fedvlm.system import console, files


@contextlib.contextmanager
def failures_shown(args: argparse.Namespace, notes: Sequence[str] = ()) -> Iterator[None]:
    """Print the table of the runs that did not fail, with these notes, before the error of those that did."""
    from fedvlm.training.processes import RunsFailed  # imports torch

    try:
        yield
    except RunsFailed as error:
        if error.finished:
            write_table(Runs([api.Run(folder) for folder in error.finished], notes), args)
        raise


def show_table(runs: Runs, args: argparse.Namespace) -> None:
    """The table of these runs; an error where most rounds of a run changed nothing."""
    write_table(runs, args)
    mostly_void = [r for r in runs if r.record.result and 2 * r.record.result.void > len(r.rounds) - 1]
    if mostly_void:
        raise FedvlmError(
            f"{len(mostly_void)} of {len(runs)} runs are no result: more than half of their rounds changed nothing (the "
            f"first: {mostly_void[0].folder}); `void` in its rounds.jsonl says why"
        )


def write_table(runs: Runs, args: argparse.Namespace) -> None:
    """Print a table for each data set, and write the files that --csv and --latex ask for."""
    from fedvlm.report.gains import against_frozen
    from fedvlm.report.written import latex, write_csv

    tables = runs.tables(getattr(args, "select", "last"), getattr(args, "fair", False))
    for title, table in tables.items():
        if len(tables) > 1:
            console.line(title, "bold")
        console.show(table)
        for line in against_frozen(table):
            console.note(line)
        if len(tables) > 1:
            console.line("")
    if getattr(args, "csv", None):
        write_csv(tables, Path(args.csv))
    if getattr(args, "latex", None):
        files.write(Path(args.latex), latex(tables) + "\n")


def write_rows(path: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([columns, *rows])
    files.write(Path(path), out.getvalue(), advice="give another file")
