"""`fedvlm encode-server [backbone= host= port= texts=true]`"""

from __future__ import annotations

import argparse
import os

from fedvlm import backbones
from fedvlm.cli.commands.values import values
from fedvlm.config import trust
from fedvlm.config.keys import Key
from fedvlm.data.encode_server import serve
from fedvlm.system import console

KEYS = [
    Key("backbone", "str", "mini-clip"),
    Key("host", "str", "127.0.0.1"),
    Key("port", "int", 8801),
    Key("texts", "bool", False),
    Key("limit_images", "int", 256),
    Key("limit_bytes", "int", 64 << 20),
]


def main(args: argparse.Namespace) -> None:
    given = values(KEYS, args.pairs)
    token = os.environ.get("FEDVLM_TOKEN")
    trust.remember_backbone(str(given["backbone"]))
    with serve(
        backbones.load(str(given["backbone"])),
        token=token,
        host=str(given["host"]),
        port=int(str(given["port"])),
        texts=bool(given["texts"]),
        limit_images=int(str(given["limit_images"])),
        limit_bytes=int(str(given["limit_bytes"])),
    ) as server:
        secured = "token required" if token else "no token"
        console.out.print(f"serving at {server.url} ({secured}); Ctrl-C ends it", markup=False)
        server.wait()
