"""`fedvlm run METHOD [key=value …]`"""

from __future__ import annotations

import argparse

from fedvlm import api, console
from fedvlm.commands.output import show_table
from fedvlm.config import key_values, resolve


def main(args: argparse.Namespace) -> None:
    setup = resolve(args.method, dict(key_values(args.pairs)))  # before torch is imported: a typo is answered at once
    pools = api.new_pools()
    if args.dry:
        from fedvlm.commands.plan import show_plan

        return show_plan(setup, api.encode(setup, pools))
    jobs = api.plan([setup], pools)
    runs = api.execute(jobs, setup.config.jobs, pools)
    show_table(runs, args)
    if len(jobs) == 1:
        console.out.print(f"run folder: {jobs[0].folder}", markup=False)
