"""`fedvlm doctor`"""

from __future__ import annotations

import argparse

from fedvlm.cli.doctor import examine
from fedvlm.errors import FedvlmError
from fedvlm.system import console
from fedvlm.system.formatting import counted

STYLES = {"ok": "green", "note": "yellow", "broken": "red"}


def main(args: argparse.Namespace) -> None:
    broken = 0
    for finding in examine():
        console.out.print(f"{finding.state:6} ", style=STYLES[finding.state], end="")
        console.out.print(finding.what + (f" → {finding.fix}" if finding.fix else ""), markup=False)
        broken += finding.state == "broken"
    if broken:
        raise FedvlmError(f"{counted(broken, 'thing')} to put right, see above")
