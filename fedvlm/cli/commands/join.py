"""`fedvlm join KIT data=FOLDER [backbone=…] [rules=site.yaml] [home=FOLDER] [health=PORT]`, `fedvlm join SITE --request`"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedvlm.cli.commands.values import values
from fedvlm.config.config import Config
from fedvlm.config.keys import Key
from fedvlm.errors import FedvlmError
from fedvlm.federation import provision, start
from fedvlm.system import console

KEYS = [
    Key("data", "str", ""),
    Key("backbone", "str", Config.backbone),
    Key("rules", "str", ""),
    Key("home", "str", ""),
    Key("health", "str", ""),
]


def main(args: argparse.Namespace) -> None:
    if args.request:
        request = provision.request_kit(args.kit, Path(args.kit).absolute())
        console.line(f"{request} goes to the office: fedvlm federation sign {request.name} in=FOLDER")
        return console.line(
            f"the keys stay here, in {request.with_name(args.kit)}; put the answer, {args.kit}.zip, beside it"
        )
    given = {k: str(v) for k, v in values(KEYS, args.pairs).items()}
    if not given["data"]:
        raise FedvlmError("say where this site's images are: fedvlm join KIT data=FOLDER")
    start.join(args.kit, **given, check=args.check)
