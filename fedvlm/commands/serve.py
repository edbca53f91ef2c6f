"""`fedvlm serve KIT [home=FOLDER]`"""

from __future__ import annotations

import argparse

from fedvlm.commands.values import values
from fedvlm.deploy import start
from fedvlm.keys import Key

KEYS = [Key("home", "str", "")]


def main(args: argparse.Namespace) -> None:
    start.serve(args.kit, str(values(KEYS, args.pairs)["home"]))
