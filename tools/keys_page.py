"""Writes docs/keys.md, every key with its default and meaning, and the catalogue that the package ships.

python tools/keys_page.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fedvlm.config import catalogue
from fedvlm.config.catalogue import Catalogue, PartInfo
from fedvlm.config.keys import Key
from fedvlm.core.ranges import Range
from fedvlm.core.records import Value

PAGE = Path(__file__).parents[1] / "docs" / "keys.md"
KINDS = {"adapter": "adapters", "local": "local rules", "merge": "merges", "metric": "metrics"}
COLUMNS = ["key", "default", "values", "meaning"]
HEAD = """# Keys
Every key with its default, its allowed values and what it does. `fedvlm show METHOD` and `fedvlm run METHOD --help` list \
those of one method with the values that it uses.

Keys are given as `key=value`: `fedvlm run fedot lr=0.01 rounds=20`, in Python `fedvlm.run("fedot", lr=0.01, rounds=20)`. \
Lists are separated by commas. If two parts have a key of the same name, `local.lr=` sets it for one of them. In `bench`, \
a key of a part with several values (`lr=0.001,0.01,0.1`) is a [sweep](compare.md#sweeps).

The last column of parts' keys names the parts that have the key; “as `name`”: the same parts as those of that key. This \
page is written by `python tools/keys_page.py` from the fields of the dataclasses; do not edit it by hand.
"""
FAIR = """fair: rows of one table must agree in it; where they do not, `bench` and `compare --fair` refuse the table, and \
notes name the difference. Data and backbone must agree in content, wherever they lie."""


def page(known: Catalogue) -> str:
    text = [HEAD, "## Keys of a run\n" + FAIR]
    for purpose in dict.fromkeys(k.purpose for k in known.run):
        of_it = ([*cells(k), "yes" if k.fair("selected") else ""] for k in known.run if k.purpose == purpose)
        text += [f"\n### {purpose.capitalize()}", *table([*COLUMNS, "fair"], of_it)]
    for kind, title in KINDS.items():
        text += [f"\n## Keys of {title}", *table([*COLUMNS, f"{kind}="], of_parts(known.parts[kind]))]
    return "\n".join(text) + "\n"


def of_parts(parts: Mapping[str, PartInfo]) -> Iterator[list[str]]:
    """A row for each meaning of a key, with the parts that have it; defaults that differ stand beside their parts."""
    found: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for name, part in parts.items():
        for key in part.keys:
            label, default, allowed, meaning = cells(key)
            found.setdefault((label, allowed, meaning), {}).setdefault(default, []).append(name)
    first: dict[str, str] = {}  # the key whose row has the same long list of parts
    labels = Counter(label for label, *_ in found)
    for (label, allowed, meaning), by_default in sorted(found.items()):
        told = {default: ", ".join(names) for default, names in by_default.items()}
        if sum(map(len, by_default.values())) == len(parts):
            most = max(by_default, key=lambda default: len(by_default[default]))
            told[most] = "all" if len(told) == 1 else "the others"
        if len(told) > 1:
            default, used = "by part", "; ".join(f"{default or 'none'}: {names}" for default, names in told.items())
        else:
            ((default, used),) = told.items()
        yield [label, default, allowed, meaning, f"as {first[used]}" if used in first else used]
        if labels[label] == 1 and used.count(",") > 3:
            first.setdefault(used, label)


def cells(key: Key) -> tuple[str, ...]:
    allowed = ", ".join(map(str, key.choices)) or within(key.range) or key.type
    default = shown(key.default)
    return f"`{key.name}`", f"`{default}`" if default else "", allowed, key.help


def within(limits: Range) -> str:
    """The range as in formulas: ≥ 0, > 0, 0 … 1."""
    low, high, above, below = limits
    if None not in (low, high) and not (above or below):
        return f"{low} … {high}"
    bounds = [(">" if above else "≥", low), ("<" if below else "≤", high)]
    return ", ".join(f"{sign} {limit}" for sign, limit in bounds if limit is not None)


def shown(value: Value) -> str:
    if isinstance(value, list):
        return ",".join(map(shown, value))
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [[c.replace("|", "\\|") for c in row] for row in (head, *rows)]
    return [f"| {' | '.join(row)} |" for row in (lines[0], ["---"] * len(head), *lines[1:])]


if __name__ == "__main__":
    made = catalogue.make(catalogue.current_digest())
    catalogue.SHIPPED.write_text(made.to_json() + "\n", encoding="utf-8")
    PAGE.write_text(page(made), encoding="utf-8")
    print(f"wrote {catalogue.SHIPPED.name} and {PAGE.name}")
