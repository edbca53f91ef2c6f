"""`fedvlm ls methods|presets|adapters|local|merges|metrics|engines|data|backbones|runs`"""

from __future__ import annotations

import argparse

from fedvlm.config import catalogue
from fedvlm.config.catalogue import Catalogue
from fedvlm.parts import registry
from fedvlm.system import console

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
    """List the runs in the folder of runs, with their last scores."""
    from fedvlm.core.records import value_of
    from fedvlm.evaluation.protocols import target
    from fedvlm.system.machine import runs_home
    from fedvlm.training.folder import find_runs

    lines = []
    for run in find_runs([str(runs_home())]):
        record = run.record
        last = record.result.last if record.result else None
        shared = (last or {}).get("shared", {}).get("test")
        scores = [value_of(last, "G"), shared, value_of(last, "P")] if last else [None] * 3
        state = str(last["round"]) if last else "not finished"
        about = [record.method.label, record.data.name, record.backbone.name, target(record), str(record.seed), state]
        lines.append([*about, *("–" if s is None else f"{100 * s:.1f}" for s in scores), run.folder.name])
    console.rows(["method", "data", "backbone", "held out", "seed", "rounds", "G", "S", "P", "folder"], lines)
    console.note(f"in {runs_home()} (FEDVLM_RUNS); `fedvlm compare` makes a table of them, `fedvlm show RUN` one run's")


def list_methods(known: Catalogue) -> None:
    rows = [[m.name, m.parts, m.private, m.upload, m.paper] for m in known.methods]
    console.rows(["method", "adapter × local × merge", "private", "kB up/client", "paper"], rows)
    console.note(
        "private: parameters that stay on a client; kB up/client: per round, for 10 classes and 512 dimensions; ?, of the "
        "tower: depends on the backbone, see `fedvlm run METHOD data=… --dry`; `fedvlm show METHOD` says what it does"
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
    console.note("weights are read from .safetensors only; docs/backbones.md says where models come from")


def list_parts(known: Catalogue, kind: str) -> None:
    rows = [[name, ", ".join(k.name for k in info.keys), info.summary] for name, info in known.parts[kind].items()]
    rows += [[name, "", f"from {module}"] for name, module in registry.installed(kind).items()]
    console.rows([kind, "keys", "what"], rows)
