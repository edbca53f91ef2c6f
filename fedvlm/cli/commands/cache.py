"""`fedvlm cache [--prune] [VIEW …]`"""

from __future__ import annotations

import argparse
import time

from fedvlm.data import store
from fedvlm.errors import FedvlmError
from fedvlm.system import console


def main(args: argparse.Namespace) -> None:
    if not args.older >= 0:
        raise FedvlmError(f"--older {args.older:g}: expected a number of days of at least 0")
    try:
        show(store.prune(args.older, args.views) if args.prune else [])
    except OSError as error:
        raise FedvlmError(f"the feature store at {store.home()} fails ({error.strerror}); set FEDVLM_CACHE") from error


def show(removed: list[str]) -> None:
    for name in removed:
        console.out.print(f"removed {name}", markup=False)
    lines = []
    for view in store.listing():
        day = time.strftime("%Y-%m-%d", time.localtime(view["used"]))
        lines.append([view["view"], str(view["segments"]), f"{view['bytes'] / 1e6:.1f} MB", day])
    console.rows(["view", "segments", "size", "last written"], lines)
    console.note(f"at {store.home()} (FEDVLM_CACHE)")
