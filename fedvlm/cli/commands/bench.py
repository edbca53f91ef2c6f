"""`fedvlm bench METHOD … [key=value …]`"""

from __future__ import annotations

import argparse

from fedvlm import api
from fedvlm.cli.commands.output import run_and_show
from fedvlm.config.config import key_values
from fedvlm.studies import comparison
from fedvlm.system import console


def main(args: argparse.Namespace) -> None:
    methods = [w for w in args.words if "=" not in w]
    pools = api.new_pools()
    setups, notes = comparison.compared(methods, dict(key_values([w for w in args.words if "=" in w])), pools)
    runs = run_and_show(api.plan(setups, pools), setups[0].config.jobs, pools, args, notes)
    from fedvlm.studies.comparison import next_steps  # imports torch

    for text in next_steps(runs):
        console.line(text)
