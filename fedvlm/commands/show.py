"""`fedvlm show METHOD [key=value …] [--yaml]`"""

from __future__ import annotations

import argparse

from fedvlm import api, console, recipe
from fedvlm.config import key_values


def main(args: argparse.Namespace) -> None:
    about = api.describe(args.method, **key_values(args.pairs))
    if args.yaml:
        print(about.to_yaml(), end="")
        return
    method, lines = about.setup.method, list[list[str]]()
    console.line(f"{method.title} {method.paper}")
    console.line(method.idea)
    home = ""
    for row in about.keys:
        if row.home != home:
            home = row.home
            lines.append([home if home == "run" else f"{home}={about.setup.parts[home].name}", "", "", ""])
        lines.append([f"  {row.key.name}", api.shown(row.value), row.origin, row.key.help])
    console.rows(["key", "value", "from", "meaning"], lines)
    for data in recipe.published_data(method.name, method.on):
        numbers = recipe.published(method.name, method.on, data)
        shown = ", ".join(f"{k} {v}" for k, v in numbers.items() if k != "source")
        console.note(f"published on {data}: {shown} ({numbers.get('source', '')})")
