"""`fedvlm attack RUN … [--what-if] [--trust]`"""

from __future__ import annotations

import argparse

from fedvlm import api
from fedvlm.cli.commands.output import write_rows
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.studies.attack import attack, table, why_not
from fedvlm.system import console


def main(args: argparse.Namespace) -> None:
    found = api.runs(*args.runs).files
    silent = [r for r in found if not r.record.reveals]
    if len(silent) == len(found):
        raise FedvlmError(f"{found[0].folder.name}: {why_not('')}")
    for run in silent:
        console.note(f"{run.folder.name} is left out: {why_not('')}")
    pools = Pools()
    rows = []
    for run in (r for r in found if r not in silent):
        rows += attack(run, api.encode(run.setup(args.trust), pools), args.what_if, args.trust)
    console.show(table(rows))
    if args.csv:
        columns = list(dict.fromkeys(k for row in rows for k in row))
        write_rows(args.csv, columns, [[row.get(c, "") for c in columns] for row in rows])
