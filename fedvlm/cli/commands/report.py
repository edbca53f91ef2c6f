"""`fedvlm report RUN … [--out page.html] [--details [--tsne]] [--images] [--watch [--port N]] [--trust]`"""

from __future__ import annotations

import argparse

from fedvlm import api
from fedvlm.errors import FedvlmError
from fedvlm.system import console


def main(args: argparse.Namespace) -> None:
    if args.watch:
        watch(args)
        return
    runs = api.runs(*args.runs, trust=args.trust)
    if args.tsne and not args.details:
        raise FedvlmError("--tsne adds to --details; give both")
    page = runs.report(args.out, details=args.details, images=args.images, tsne=args.tsne)
    console.line(f"page: {page} (open it in a browser)")


def watch(args: argparse.Namespace) -> None:
    """Until Ctrl-C."""
    from fedvlm.report.live import LOOPBACK, Live, server
    from fedvlm.report.page import Options

    if args.images:
        raise FedvlmError("--images is for a page that you keep; leave it out with --watch")
    made = server(Live(args.runs, Options(details=args.details)), args.port)
    console.line(f"http://{LOOPBACK}:{made.server_port}/ shows the page while runs go on; Ctrl-C stops it")
    with made:
        made.serve_forever()
