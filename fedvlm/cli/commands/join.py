"""`fedvlm join KIT data=FOLDER [backbone=…] [rules=site.yaml] [home=FOLDER] [health=PORT]`"""

from __future__ import annotations

import argparse

from fedvlm.cli.commands.values import values
from fedvlm.config.config import Config
from fedvlm.config.keys import Key
from fedvlm.errors import FedvlmError
from fedvlm.federation import start

KEYS = [
    Key("data", "str", ""),
    Key("backbone", "str", Config.backbone),
    Key("rules", "str", ""),
    Key("home", "str", ""),
    Key("health", "str", ""),
]


def main(args: argparse.Namespace) -> None:
    given = {k: str(v) for k, v in values(KEYS, args.pairs).items()}
    if not given["data"]:
        raise FedvlmError("say where this site's images are: fedvlm join KIT data=FOLDER")
    start.join(args.kit, **given, check=args.check)
