"""`fedvlm compare RUN …`"""

from __future__ import annotations

import argparse

from fedvlm import api
from fedvlm.cli.commands.output import show_table


def main(args: argparse.Namespace) -> None:
    show_table(api.runs(*args.runs), args)
