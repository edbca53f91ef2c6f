"""`fedvlm ls methods|presets|adapters|local|merges|metrics|engines|data`"""

from __future__ import annotations

import argparse

from fedvlm import catalogue, console, parts
from fedvlm.catalogue import Catalogue

KINDS = {"adapters": "adapter", "local": "local", "merges": "merge", "metrics": "metric", "engines": "engine"}


def main(args: argparse.Namespace) -> None:
    known = catalogue.load()
    if args.what == "methods":
        list_methods(known)
    elif args.what == "presets":
        console.rows(["preset", "what"], [[name, title] for name, title in known.presets.items()])
        console.note("put a method on one: fedvlm run ga on=unet")
    elif args.what == "data":
        list_data()
    else:
        list_parts(known, KINDS[args.what])


def list_methods(known: Catalogue) -> None:
    rows = [[m.name, m.parts, m.private, m.upload, m.paper] for m in known.methods]
    console.rows(["method", "adapter × local × merge", "private", "KB up/client", "paper"], rows)
    console.note("bytes for 10 classes and 512 dimensions; `fedvlm show METHOD` says what it does")


def list_data() -> None:
    console.rows(["data", "domains", "classes", "images"], [["emoji (embedded)", *emoji_counts()]])
    console.note(
        "or data=FOLDER of domain/class/image or class/image (classes), of site/image/… and site/mask/… (masks), "
        "a .jsonl[.gz] file of {role, text} (next characters), or a .safetensors file of embeddings"
    )


def emoji_counts() -> list[str]:
    import zipfile
    from pathlib import Path

    with zipfile.ZipFile(Path(parts.HERE) / "data" / "assets" / "emoji.zip") as box:
        names = [n.split("/") for n in box.namelist() if n.endswith(".png")]
    return [str(len({n[0] for n in names})), str(len({n[1] for n in names})), str(len(names))]


def list_parts(known: Catalogue, kind: str) -> None:
    rows = [[name, ", ".join(k.name for k in info.keys), info.summary] for name, info in known.parts[kind].items()]
    rows += [[name, "", f"from {module}"] for name, module in parts.installed(kind).items()]
    console.rows([kind, "keys", "what"], rows)
