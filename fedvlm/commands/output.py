"""Tables on the screen and in files, as several commands print them."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from fedvlm import console
from fedvlm.api import Runs
from fedvlm.errors import FedvlmError


def show_table(runs: Runs, args: argparse.Namespace) -> None:
    """The table of these runs, and the files that --csv and --latex ask for."""
    table = runs.table(getattr(args, "select", "last"))
    console.show(table)
    if getattr(args, "csv", None):
        from fedvlm.report.tables import write_csv

        write_csv(table, Path(args.csv))
    if getattr(args, "latex", None):
        from fedvlm.report.tables import latex

        Path(args.latex).write_text(latex(table) + "\n", encoding="utf-8")


def write_rows(path: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([columns, *rows])
    except OSError as error:
        raise FedvlmError(f"{path} cannot be written ({error.strerror}); give another file") from error
