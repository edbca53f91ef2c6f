"""A page of the documentation for each method, from what is there already: its recipe, the docstrings of its parts, the
papers' numbers (benchmarks/papers/tables) and ours (docs/results.md, docs/claims.md). tools/site_pages.py puts them into
the site.

    python tools/method_pages.py fedot        # prints one
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from keys_page import shown, table

from fedvlm import api
from fedvlm.config import recipe
from fedvlm.config.config import Setup, resolve
from fedvlm.core.adapter import Adapter, HasDiagnostics, NeedsNouns, Task
from fedvlm.core.copies import COPY
from fedvlm.core.records import UPDATE, UPDATE_MEANING
from fedvlm.core.state import nbytes
from fedvlm.data.pool import task_of
from fedvlm.rounds.method import Method

DOCS = Path(__file__).parent.parent / "docs"
CLASSES = tuple(f"class {i}" for i in range(10))  # for the sizes
AXES = {"adapter": "what is trained", "local": "how a client trains", "merge": "what the server does"}
FAMILIES = {
    "embeddings": "On embeddings",
    "prompts": "Prompts",
    "patches": "Prompts and patches",
    "towers": "Inside the towers",
    "networks": "Whole networks",
}
MOST_NOUNS = 1000  # more than any recipe takes
NEEDS = {
    "both towers": "both of the backbone's towers",
    "text tower": "the backbone's text tower",
    "image tower": "the backbone's image tower",
    "whole model": "the whole model",
}
NOT_RUN = "Not among [our tables](../results.md) yet.\n"
MEASURES = ("G", "S", "P", "C", "local", "base", "novel", "hm")


class Grid(NamedTuple):
    """A table of a Markdown page."""

    title: str  # of the section that it stands in
    columns: list[str]
    rows: list[list[str]]


def pages() -> dict[str, str]:
    """The Markdown of every method's page, by the method's name."""
    return {name: page(name) for name in recipe.recipe_names()}


@cache
def family(name: str) -> str:
    """The group of methods that it is listed in: by the input of its adapter."""
    adapter = resolve(name, {}).adapter
    if adapter.view == "pixels":
        return "networks"
    if adapter.view.startswith("hidden"):
        return "towers"
    if adapter.view == "patches":
        return "patches"
    return "prompts" if adapter.requires else "embeddings"


def page(name: str) -> str:
    setup = resolve(name, {})
    about = setup.method
    lines = [f"# {about.title}", f"*{about.paper}*\n" if about.paper else "", f"{sentence(about.idea)}\n"]
    lines += [f"```\nfedvlm run {name} data=FOLDER\n```\n", *overview(setup)]
    lines += ["\n## Idea and equations", *equations(setup), "\n## Settings", *settings(name)]
    lines += ["\n## Published results", *published(name), "\n## Our results", *ours(name)]
    lines += ["\n## Mechanisms", *acting(setup), "\n## Pitfalls", *pitfalls(setup)]
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def overview(setup: Setup) -> list[str]:
    method = built(setup)
    private = dict.fromkeys(
        "a copy of the shared parameters" if k.startswith(COPY) else f"`{k}`" for k in method.newcomer
    )
    up = nbytes(method.initial) + method.upload_bytes if method.trains else 0
    grows = [f"`{k}`" for k, f in method.uploads.items() if -1 in f.shape]
    size = f"{up / 1e3:,.4g} kB" + f" and, by the number of images, {' and '.join(grows)}" * bool(grows)
    parts = " × ".join(f"{axis} [`{setup.parts[axis].name}`](#{axis}-{setup.parts[axis].name})" for axis in AXES)
    rows = [
        ["parts", parts],
        ["works on", works_on(setup.adapter)],
        ["private to a client", listed(private) or "nothing"],
        ["sent by a client per round", f"{size}: {listed(sent(method)) or 'nothing'}"],
    ]
    if setup.merge.reveals:
        rows.append(["sent besides parameters", f"**clients send {setup.merge.reveals}**"])
    note = "Sizes are for one client with mini-clip, 10 classes and the settings below; `fedvlm run … --dry` prints yours.\n"
    return [*table(["", ""], rows), "", note]


def sent(method: Method) -> list[str]:
    return [f"`{k}`" for k in (*method.initial, *method.uploads)] if method.trains else []


def listed(names: Iterable[str], most: int = 6) -> str:
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def works_on(adapter: Adapter) -> str:
    needs = f"; needs {NEEDS[adapter.requires]}" if adapter.requires else ""
    view = {
        "raw": "image embeddings before normalisation",
        "embedding": "image embeddings",
        "patches": "patch embeddings",
    }
    stored = "stored activations of the image tower" if adapter.view.startswith("hidden") else adapter.view
    return view.get(adapter.view, stored) + needs


def built(setup: Setup) -> Method:
    """The method on mini-clip, for its sizes; nouns count by their number only."""
    task = task_on(setup.adapter.requires)
    if isinstance(setup.adapter, NeedsNouns):
        task = task._replace(nouns=tuple(f"noun {i}" for i in range(MOST_NOUNS)))
    return Method.build(setup.adapter, setup.local, setup.merge, task)


@cache
def task_on(requires: str) -> Task:
    from fedvlm.backbones import load

    return task_of(load("mini-clip"), CLASSES, "a photo of a {}", requires)


def equations(setup: Setup) -> Iterator[str]:
    """The docstrings of the three parts' files."""
    for axis, does in AXES.items():
        name = setup.parts[axis].name
        yield f"\n### {axis.capitalize()} `{name}`: {does} {{#{axis}-{name}}}"
        yield markdown(inspect.getmodule(type(getattr(setup, axis))).__doc__ or "")


def markdown(docstring: str) -> str:
    """Single asterisks and [a](b) are mathematics here, no emphasis and no links, unless they stand in `code` or in an
    indented block."""

    def plain(line: str) -> str:
        starred = re.sub(r"(?<!\*)\*(?!\*)", r"\\*", line)
        return line if line.startswith("    ") else re.sub(r"\](?=[(\[])", r"]\\", starred)

    spans = inspect.cleandoc(docstring).split("`")  # every second one is code
    return "`".join(s if i % 2 else "\n".join(map(plain, s.split("\n"))) for i, s in enumerate(spans)) + "\n"


def settings(name: str) -> list[str]:
    """Every key that does not have its default, as the paper has it and as tuned for mini-clip."""
    paper, tuned = api.describe(name, values="paper"), api.describe(name)
    rows = []
    for row, here in zip(paper.keys, tuned.keys, strict=True):
        if (row.origin or here.origin) and row.key.name != "values":
            rows.append(
                [f"`{row.key.name}`", row.home, f"`{shown(row.value)}`", f"`{shown(here.value)}`", row.key.help]
            )
    rest = f"All other keys have their defaults: see `fedvlm show {name}` and [keys](../keys.md).\n"
    head = ["key", "part", "recipe", "on mini-clip", "meaning"]
    return [*table(head, rows), "", rest] if rows else [rest]


def published(name: str) -> list[str]:
    """What papers print of it."""
    rows = []
    for method, on, data, under, numbers in entries():
        if method == name:
            values = ", ".join(f"{k} {v}" for k, v in numbers.items() if k != "source")
            keys = [f"on={on}"] * bool(on) + [f"{k}={v}" for k, v in under.items()]
            rows.append([data, " ".join(keys), values, str(numbers["source"])])
    if not rows:
        return ["The papers in `benchmarks/papers/tables` report no number for it that a run can be compared with.\n"]
    return [
        *table(["data", "keys", "in %", "source"], rows),
        "",
        "[Reproduce a table](../reproduce.md) with your data.\n",
    ]


@cache
def entries() -> list[tuple[str, str, str, dict[str, object], dict[str, object]]]:
    found: list[tuple[str, str, str, dict[str, object], dict[str, object]]]
    found = json.loads(recipe.PUBLISHED.read_text(encoding="utf-8"))
    return found


def ours(name: str) -> list[str]:
    """The rows of docs/results.md, and of the paper's claims in docs/claims.md."""
    rows = []
    for grid in grids(DOCS / "results.md"):
        for row in grid.rows:
            if row[0].split()[:1] == [name]:
                values = [f"{m} {row[grid.columns.index(m)]}" for m in MEASURES if m in grid.columns]
                rows.append([grid.title, row[0], ", ".join(values)])
    found = [*table(["data and keys", "row", "test, %, ± std over seeds"], rows), ""] if rows else []
    found.append("Measured with mini-clip; protocol and notes: [results](../results.md).\n" if rows else NOT_RUN)
    for grid in (g for g in grids(DOCS / "claims.md") if g.title == name):
        wanted = [i for i, c in enumerate(grid.columns) if c.startswith(("claim", "ours", "mechanism", "verdict"))]
        head = [grid.columns[i] for i in wanted]
        checked = table(head, ([row[i] for i in wanted] for row in grid.rows))
        found += ["The [claims](../claims.md) of its paper, tested with mini-clip:\n", *checked, ""]
    return found


@cache
def grids(path: Path) -> tuple[Grid, ...]:
    """The tables of a Markdown page."""
    found, title, lines = list[Grid](), "", list[str]()
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
            continue
        if len(lines) > 2:
            head, _, *body = ([c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", x)[1:-1]] for x in lines)
            found.append(Grid(title, head, [row for row in body if len(row) == len(head)]))
        lines = []
        title = line.lstrip("# ") if line.startswith("#") else title
    return tuple(found)


def acting(setup: Setup) -> list[str]:
    """What its parts and the server record of what they did."""
    rows = [
        [f"`{name}`", f"{axis} `{setup.parts[axis].name}`", meaning]
        for axis in ("local", "merge")
        for name, meaning in getattr(setup, axis).effects.items()
    ]
    if isinstance(setup.adapter, HasDiagnostics):
        home = f"adapter `{setup.parts['adapter'].name}`, last round"
        rows += [[f"`{name}`", home, meaning] for name, meaning in setup.adapter.diagnostics.items()]
    rows.append([f"`{UPDATE}`", "the server", UPDATE_MEANING])
    note = "Each round's record has these numbers (medians over clients); `fedvlm show RUN` and the page show them.\n"
    return [*table(["number", "recorded by", "meaning"], rows), "", note]


def pitfalls(setup: Setup) -> list[str]:
    """What follows from its parts, and what docs/methods.md and docs/pitfalls.md say of it by name."""
    adapter, found = setup.adapter, list[str]()
    if setup.merge.reveals:
        found.append(f"Clients send {setup.merge.reveals}: a site's rules refuse this unless `reveals: true`.")
    if adapter.requires:
        needs = NEEDS[adapter.requires]
        found.append(f"It needs {needs}: others, such as black boxes, are refused ([backbones](../backbones.md)).")
    if not adapter.open_vocabulary:
        found.append("It has parameters by class: it cannot be scored on classes that nobody trained on.")
    tuned = [layer.origin for layer in recipe.load(setup.method.name).layers("mini-clip") if "tuned" in layer.origin]
    if tuned:
        found.append("Its settings on mini-clip were tuned on validation; with CLIP give `values=paper`, or a sweep.")
    found += [b for page in ("methods.md", "pitfalls.md") for b in bullets(page) if names(setup, b)]
    return [f"- {line}" for line in found] or ["None known except the [general ones](../pitfalls.md)."]


@cache
def bullets(name: str) -> tuple[str, ...]:
    text = (DOCS / name).read_text(encoding="utf-8")
    within = text.partition("## Interpretations")[2].partition("\n## ")[0] if name == "methods.md" else text
    return tuple(re.sub(r"\]\((\w[\w-]*\.md)", r"](../\1", b) for b in re.findall(r"^- (.+)", within, re.MULTILINE))


def names(setup: Setup, text: str) -> bool:
    """Whether a text speaks of this method, by its title (without what stands in brackets) or its recipe's name."""
    title = re.split(r"[(,]", setup.method.title)[0].strip()
    return bool(re.search(rf"(?<![\w-])({re.escape(title)}|{re.escape(setup.method.name)})(?![\w-])", text))


if __name__ == "__main__":
    print("\n".join(map(page, sys.argv[1:])))
