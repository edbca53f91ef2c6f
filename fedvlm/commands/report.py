"""`fedvlm report RUN … [--out page.html]`"""

from __future__ import annotations

import argparse

from fedvlm import api, console


def main(args: argparse.Namespace) -> None:
    console.line(f"page: {api.runs(*args.runs).report(args.out)}")
