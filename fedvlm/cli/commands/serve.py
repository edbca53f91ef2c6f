"""`fedvlm serve KIT [home=FOLDER] [backbone=…] [health=PORT]`"""

from __future__ import annotations

import argparse

from fedvlm.cli.commands.values import values
from fedvlm.config.keys import Key
from fedvlm.federation import start

KEYS = [Key("home", "str", ""), Key("backbone", "str", ""), Key("health", "str", "")]


def main(args: argparse.Namespace) -> None:
    start.serve_federation(args.kit, **{k: str(v) for k, v in values(KEYS, args.pairs).items()})
