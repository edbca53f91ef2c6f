"""`fedvlm demo [key=value …]`"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fedvlm import api
from fedvlm.cli.commands.output import show_table
from fedvlm.cli.demo import DEFAULTS, METHODS, conclude
from fedvlm.config.config import key_values, resolve
from fedvlm.system import console


def main(args: argparse.Namespace) -> None:
    began = time.monotonic()
    given = {**DEFAULTS, **key_values(args.pairs)}
    setups = [resolve(m, given) for m in METHODS]
    runs = api.execute(api.plan(setups, api.new_pools()), setups[0].config.jobs)
    show_table(runs, args)
    conclude(runs.files, Path(setups[0].config.out) / "demo.png")
    console.note(f"{time.monotonic() - began:.0f} s in all")
