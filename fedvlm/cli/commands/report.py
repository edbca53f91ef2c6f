"""`fedvlm report RUN … [--out page.html] [--details [--tsne]] [--images] [--trust]`"""

from __future__ import annotations

import argparse

from fedvlm import api
from fedvlm.errors import FedvlmError
from fedvlm.system import console


def main(args: argparse.Namespace) -> None:
    runs = api.runs(*args.runs, trust=args.trust)
    if args.tsne and not args.details:
        raise FedvlmError("--tsne adds to --details; give both")
    page = runs.report(args.out, details=args.details, images=args.images, tsne=args.tsne)
    console.line(f"page: {page} (open it in a browser)")
