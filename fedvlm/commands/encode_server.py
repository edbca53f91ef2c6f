"""`fedvlm encode-server [backbone= host= port= texts=true]`"""

from __future__ import annotations

import argparse
import os

from fedvlm import backbones, console, trust
from fedvlm.backbones.server import serve
from fedvlm.config import key_values
from fedvlm.keys import Key, unknown

KEYS = [
    Key("backbone", "str", "mini-clip"),
    Key("host", "str", "127.0.0.1"),
    Key("port", "int", 8801),
    Key("texts", "bool", False),
    Key("limit_images", "int", 256),
    Key("limit_bytes", "int", 64 << 20),
]


def main(args: argparse.Namespace) -> None:
    known = {k.name: k for k in KEYS}
    given = {k.name: k.default for k in KEYS}
    for key, value in key_values(args.pairs).items():
        if key not in known:
            raise unknown(key, known)
        given[key] = known[key].coerce(value)
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
