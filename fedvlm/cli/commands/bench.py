"""`fedvlm bench METHOD … [key=value …]`"""

from __future__ import annotations

import argparse

from fedvlm import api
from fedvlm.cli.commands.output import failures_shown, show_table
from fedvlm.config.config import key_values
from fedvlm.studies import comparison
from fedvlm.system import console


def main(args: argparse.Namespace) -> None:
    methods = [w for w in args.words if "=" not in w]
    planned, notes = comparison.compared(methods, dict(key_values([w for w in args.words if "=" in w])))
    with failures_shown(args, notes):
        runs = api.Runs(api.execute(planned, planned[0].setup.config.jobs).members, notes)
    show_table(runs, args)
    from fedvlm.studies.comparison import next_steps  # imports torch

    for text in next_steps(runs):
        console.line(text)
