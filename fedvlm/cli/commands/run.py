"""`fedvlm run METHOD [key=value …]`"""

from __future__ import annotations

import argparse

from fedvlm import api
from fedvlm.cli.commands.output import run_and_show, show_table
from fedvlm.config.config import key_values
from fedvlm.system import console
from fedvlm.system.interrupts import shell_line


def main(args: argparse.Namespace) -> None:
    setup = api.chosen(args.method, key_values(args.pairs))  # before torch is imported: a typo is answered at once
    if setup.config.federation:
        run = api.federated(setup)
        show_table(api.Runs([run]), args)
        return console.line(f"run folder: {run.folder}")
    pools = api.new_pools()
    if args.dry:
        from fedvlm.cli.commands.plan import show_plan
        from fedvlm.data.sample import sampled_pool
        from fedvlm.training.planning import checked_outline

        return show_plan(setup, sampled_pool(setup, checked_outline(setup, pools)))
    jobs = api.plan([setup], pools)
    run_and_show(jobs, setup.config.jobs, pools, args)
    if len(jobs) > 1:
        return console.line(f"{len(jobs)} runs in {jobs[0].folder.parent}")
    folder = str(jobs[0].folder)
    console.line(f"run folder: {folder}")
    for words in (["report", folder, "--details"], ["predict", folder, "IMAGE"]):
        console.line("next: " + shell_line(["fedvlm", *words]))
