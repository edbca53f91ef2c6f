"""`fedvlm resume RUN … [--trust]`"""

from __future__ import annotations

import argparse

from fedvlm import api
from fedvlm.cli.commands.output import show_table


def main(args: argparse.Namespace) -> None:
    show_table(api.resume(api.runs(*args.runs, trust=args.trust)), args)
