"""`fedvlm cache [--prune] [VIEW …]`"""

from __future__ import annotations

import argparse
import time

from fedvlm import console
from fedvlm.data import store


def main(args: argparse.Namespace) -> None:
    if args.prune:
        for name in store.prune(args.older, args.views):
            console.out.print(f"removed {name}", markup=False)
    lines = []
    for view in store.listing():
        day = time.strftime("%Y-%m-%d", time.localtime(view["used"]))
        lines.append([view["view"], str(view["segments"]), f"{view['bytes'] / 1e6:.1f} MB", day])
    console.rows(["view", "segments", "size", "last written"], lines)
    console.note(f"at {store.home()} (FEDVLM_CACHE)")
