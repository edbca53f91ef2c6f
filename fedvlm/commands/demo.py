"""`fedvlm demo [key=value …]`"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fedvlm import api, console
from fedvlm.commands.output import show_table
from fedvlm.config import key_values, resolve
from fedvlm.demo import DEFAULTS, METHODS, conclude


def main(args: argparse.Namespace) -> None:
    began = time.monotonic()
    given = {**DEFAULTS, **key_values(args.pairs)}
    setups, pools = [resolve(m, given) for m in METHODS], api.new_pools()
    runs = api.execute(api.plan(setups, pools), setups[0].config.jobs, pools)
    show_table(runs, args)
    conclude(runs.files, Path(setups[0].config.out) / "demo.png")
    console.note(f"{time.monotonic() - began:.0f} s in all")
