"""Tables on the screen and in files, as several commands print them."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedvlm import api, console, files
from fedvlm.api import Runs
from fedvlm.errors import FedvlmError

if TYPE_CHECKING:
    from fedvlm.data.pool import Pools
    from fedvlm.planning import Job


def run_and_show(jobs: list[Job], at_once: int, pools: Pools, args: argparse.Namespace) -> None:
    """Runs them and prints their table; where some fail, the table of the others, and then the error."""
    from fedvlm.processes import RunsFailed  # imports torch

    try:
        show_table(api.execute(jobs, at_once, pools), args)
    except RunsFailed as error:
        if error.finished:
            write_table(Runs([api.Run(folder) for folder in error.finished]), args)
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
    """On the screen, and to the files that --csv and --latex ask for."""
    table = runs.table(getattr(args, "select", "last"))
    console.show(table)
    if getattr(args, "csv", None):
        from fedvlm.report.tables import write_csv

        write_csv(table, Path(args.csv))
    if getattr(args, "latex", None):
        from fedvlm.report.tables import latex

        files.write(Path(args.latex), latex(table) + "\n")


def write_rows(path: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([columns, *rows])
    files.write(Path(path), out.getvalue(), advice="give another file")
