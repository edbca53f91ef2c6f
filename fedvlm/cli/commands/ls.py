"""`fedvlm ls methods|presets|adapters|local|merges|metrics|engines|data|backbones|runs`"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fedvlm.config import catalogue
from fedvlm.config.catalogue import Catalogue
from fedvlm.config.families import FAMILIES, PAPERS, family
from fedvlm.core.hub_names import WEIGHTS
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.system import console
from fedvlm.system.formatting import counted

if TYPE_CHECKING:
    from fedvlm.training.folder import RunFolder

KINDS = {"adapters": "adapter", "local": "local", "merges": "merge", "metrics": "metric", "engines": "engine"}


def main(args: argparse.Namespace) -> None:
    known = catalogue.load()
    if args.what == "methods":
        list_methods(known)
    elif args.what == "presets":
        console.rows(["preset", "what"], [[name, title] for name, title in known.presets.items()])
        console.note("put a method on one: fedvlm run ga on=unet")
    elif args.what == "data":
        list_data(known)
    elif args.what == "backbones":
        list_backbones(known)
    elif args.what == "runs":
        list_runs()
    else:
        list_parts(known, KINDS[args.what])


def list_runs() -> None:
    """List the runs in the folder of runs, with their last scores: a table for each folder that holds some."""
    from itertools import groupby

    from fedvlm.report.columns import DEFINED
    from fedvlm.system.machine import runs_home
    from fedvlm.training.folder import find_runs

    found = find_runs([str(runs_home())])
    for folder, members in groupby(found, lambda run: run.folder.parent):
        lines = list[list[str]]()
        for run in members:
            try:
                lines.append([str(len(lines) + 1), *about_run(run)])
            except FedvlmError as error:
                console.warn(str(error))
        console.line(f"{folder.resolve()}: {counted(len(lines), 'run')}", "bold")
        titles = [DEFINED[m].title for m in ("G", "P", "S")]
        about = ["run", "held out", "seed", "data", "backbone", "started"]
        console.rows(["#", "method", *titles, "rounds", *about], lines)
    console.note("`fedvlm show|predict|export|compare|report|resume` take these names and folders, from any folder")


def about_run(run: RunFolder) -> list[str]:
    from fedvlm.core.records import value_of
    from fedvlm.evaluation.protocols import target

    record = run.record
    last = record.result.last if record.result else None
    shared = (last or {}).get("shared", {}).get("test")
    scores = [value_of(last, "G"), value_of(last, "P"), shared] if last else [None] * 3
    shown = ["–" if s is None else f"{100 * s:.1f}" for s in scores]
    about = [
        run.folder.name,
        target(record),
        str(record.seed),
        record.data.name,
        record.backbone.name,
        record.started[:16],
    ]
    return [record.method.label, *shown, str(last["round"]) if last else "not finished", *about]


def list_methods(known: Catalogue) -> None:
    for name, about in FAMILIES.items():
        rows = []
        for m in known.methods:
            adapter, _, merge = m.parts.split(" × ")
            if family(m.name, adapter, merge) == name:
                rows.append([m.name + " ◆" * (m.name in PAPERS), m.idea, m.private, m.upload, m.paper])
        console.line(f"{name} – {about.when}", "bold")
        console.rows(["method", "what it does", "private", "kB up/client", "paper"], rows)
        console.line("")
    console.note(
        "◆ one of the five papers that fedvlm reproduces. private: parameters that stay on a client; kB up/client: per "
        "round, for 10 classes and 512 dimensions; ?, of the tower: depends on the backbone, see `fedvlm run METHOD data=… "
        "--dry`; `fedvlm show METHOD` says what it does; `fedvlm choose data=FOLDER` tries them on your images"
    )


def list_data(known: Catalogue) -> None:
    list_parts(known, "format")
    console.note("data=NAME is in the format that recognises it, data=FORMAT:NAME in that one; data=emoji is embedded")


def list_backbones(known: Catalogue) -> None:
    whole = set.union(*({a.split()[0] for a in b.adapters} for b in known.backbones))
    for b in known.backbones:
        console.line(f"{b.name}: backbone={b.how}")
        missing = sorted(whole - {a.split()[0] for a in b.adapters})
        listed = f"all but {', '.join(missing)}" if len(missing) < len(b.adapters) else ", ".join(b.adapters)
        console.note(f"  adapters: {listed if missing else 'all'}")
    lines = [[name, about.source, about.size, about.licence] for name, about in WEIGHTS.items()]
    console.rows(["backbone=", "from the hub", "about", "licence"], lines)
    console.note("weights are read from .safetensors only; docs/backbones.md says where models come from")


def list_parts(known: Catalogue, kind: str) -> None:
    rows = [[name, ", ".join(k.name for k in info.keys), info.summary] for name, info in known.parts[kind].items()]
    rows += [[name, "", f"from {module}"] for name, module in registry.installed(kind).items()]
    console.rows([kind, "keys", "what"], rows)
