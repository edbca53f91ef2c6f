"""`fedvlm run METHOD [key=value …]`"""

from __future__ import annotations

import argparse

from fedvlm import api
from fedvlm.cli.commands.output import failures_shown, show_table
from fedvlm.config.config import key_values
from fedvlm.system import console
from fedvlm.system.interrupts import shell_line


def main(args: argparse.Namespace) -> None:
    setup = api.chosen(args.method, key_values(args.pairs))  # before torch is imported: a typo is answered at once
    if setup.config.federation:
        if args.dry:
            from fedvlm.cli.commands.plan import show_submission

            return show_submission(setup)
        run = api.federated(setup)
        show_table(api.Runs([run]), args)
        return console.line(f"run folder: {run.folder}")
    if args.dry:
        from fedvlm.cli.commands.plan import show_plan

        return show_plan(setup)
    planned = api.plan([setup], api.new_pools())
    with failures_shown(args):
        runs = api.execute(planned, setup.config.jobs)
    show_table(runs, args)
    if len(runs) > 1:
        return console.line(f"{len(runs)} runs in {runs[0].folder.parent}")
    folder = str(runs[0].folder)
    console.line(f"run folder: {folder}")
    for words in (["report", folder, "--details"], ["predict", folder, "IMAGE"]):
        console.line("next: " + shell_line(["fedvlm", *words]))
