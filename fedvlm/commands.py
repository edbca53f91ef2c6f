"""What each command of the command line does. Heavy imports wait until a command needs them: `fedvlm ls` is quick."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvlm.core import FedvlmError

if TYPE_CHECKING:
    from fedvlm.config import Setup
    from fedvlm.data.federation import Pool
    from fedvlm.runs import Run

Job = tuple["Setup", Path]  # a run, and its folder


def encoded(setup: Setup) -> Pool:
    """The images as the backbone sees them, with a bar while it looks."""
    from fedvlm import console, train

    with console.progress("encoding") as update:
        pool = train.load_pool(setup, lambda done, total: update(done, total=total))
    for name, why in list(pool.skipped.items())[:10]:
        console.err.print(f"left out: {name}: {why}", style="yellow")
    if len(pool.skipped) > 10:
        console.err.print(f"left out: {len(pool.skipped) - 10} more (run.json names them all)", style="yellow")
    return pool


def run(args: argparse.Namespace) -> None:
    from fedvlm import console, train
    from fedvlm.config import pairs, resolve

    setup = resolve(args.method, pairs(args.pairs))
    pool = encoded(setup)
    jobs = train.runs_of(setup, pool)
    if args.dry:
        return _dry(jobs, pool)
    alone = len(jobs) == 1
    folders = [Path(j.config.out) if alone and j.config.out else train.place(j, pool) for j in jobs]
    reveal([setup])
    finished = run_all(list(zip(jobs, folders, strict=True)), setup.config.jobs)
    _table(finished, args)
    if alone:
        console.out.print(f"run folder: {folders[0]}")


def bench(args: argparse.Namespace) -> None:
    from fedvlm.config import pairs, resolve

    methods = [w for w in args.words if "=" not in w]
    given: dict[str, Any] = {"seeds": "50,77,98"} | pairs([w for w in args.words if "=" in w])
    if "seed" in given:
        given["seeds"] = given.pop("seed")
    if not methods:
        raise FedvlmError("bench needs at least one method; `fedvlm ls methods` names them")
    setups = [resolve(m, given) for m in methods]
    if "protocol" not in given and "unseen" not in given and len(encoded(setups[0]).source.domains) >= 3:
        setups = [s.with_(protocol="leave-one-domain-out") for s in setups]
    reveal(setups)
    _table(run_all(jobs_of(setups), setups[0].config.jobs), args)


def reveal(setups: list[Setup]) -> None:
    """Before anything runs: what of private data will leave a client, beside parameters and numbers."""
    from fedvlm import console

    for setup in setups:
        if setup.merge.reveals:
            console.err.print(f"{setup.recipe.name}: clients send {setup.merge.reveals}", style="yellow")


def jobs_of(setups: list[Setup]) -> list[Job]:
    """Every single run of these, with its folder; adapters that read the same view share what was encoded."""
    from fedvlm import train

    pools = [encoded(s) for s in setups]
    return [(j, train.place(j, p)) for s, p in zip(setups, pools, strict=True) for j in train.runs_of(s, p)]


def run_all(jobs: list[Job], at_once: int) -> list[Run]:
    """Runs them with one bar over all their rounds."""
    if not jobs:
        return []
    from fedvlm import bench, console
    from fedvlm.runs import Run

    known = [f for _, f in jobs if (f / "run.json").exists() and Run(f).done]
    if known:
        text = (
            f"{known[0]} is already there" if len(jobs) == 1 else f"{len(known)} of {len(jobs)} runs are already there"
        )
        console.out.print(f"{text}: recognised, not repeated", style="dim")
    sizes = [1 + s.config.rounds for s, _ in jobs]
    done = [0] * len(jobs)
    title = jobs[0][0].recipe.name if len(jobs) == 1 else f"{len(jobs)} runs"
    with console.progress(title, sum(sizes)) as update:

        def report(i: int, record: dict[str, Any] | None, error: str) -> None:
            done[i] = sizes[i] if record is None else record["round"] + 1
            what = "" if len(jobs) == 1 else f"{jobs[i][0].recipe.name} {'+'.join(jobs[i][0].config.unseen)} "
            if record is not None:
                update(sum(done), what + console.words(record))

        return bench.run_all(jobs, at_once, report)


def _table(runs: list[Run], args: argparse.Namespace) -> None:
    from fedvlm import console
    from fedvlm.report import tables

    table = tables.summarise(runs, getattr(args, "select", "last"))
    console.show(table)
    if getattr(args, "csv", None):
        tables.write_csv(table, Path(args.csv))
    if getattr(args, "latex", None):
        Path(args.latex).write_text(tables.latex(table) + "\n")


def _dry(jobs: list[Setup], pool: Pool) -> None:
    from fedvlm import console, train
    from fedvlm.data.federation import table

    setup = jobs[0]
    method, federation = train.prepare(setup, pool)
    names = [c.replace("_", " ") for c in federation.task.classes]
    shown = names if len(names) <= 12 else []
    lines = []
    for row in table(federation)[:40]:
        role = "held out" if row["unseen"] else "trains" if row["train"] else "no data"
        counts = [str(n) for n in row["classes"]] if shown else [str(sum(n > 0 for n in row["classes"]))]
        lines.append([row["client"], role, *(str(row[s]) for s in ("train", "val", "test")), *counts])
    console.rows(["client", "role", "train", "val", "test", *(shown or ["classes"])], lines)
    if len(federation.names) > 40:
        console.out.print(f"… and {len(federation.names) - 40} more clients", style="dim")
    if federation.task.novel:
        told = "" if "novel" in method.halves else f", which adapter={setup.chosen['adapter']} cannot be asked about"
        images = " and ".join(f"{len(y)} of {half}" for half, (_, y) in federation.data.halves.items())
        console.out.print(
            f"nobody trains on {len(federation.task.novel.classes)} novel classes{told}; test images: {images} classes"
        )
    wire = train.estimate(method, federation, setup)
    total = wire["seconds"] * setup.config.rounds * len(jobs)
    console.out.print(
        f"{len(jobs)} run{'s' * (len(jobs) > 1)} × {setup.config.rounds} rounds; a round asks {wire['asked']} clients: "
        f"{wire['down'] / 1e6:.3g} MB down, {wire['up'] / 1e6:.3g} MB up, about {wire['seconds']:.2g} s "
        f"({total:.2g} s in all, one after the other)"
    )
    console.out.print(
        f"private to each client: {listed(method.newcomer) or 'nothing'}; "
        f"goes up: {', '.join([listed(method.initial), *method.sends])}"
        + (f" ({setup.merge.reveals})" if setup.merge.reveals else "")
    )


def listed(names: Iterable[str], most: int = 8) -> str:
    """A network has hundreds of names: the first few, and how many more."""
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def compare(args: argparse.Namespace) -> None:
    from fedvlm import runs

    _table(runs.find(args.runs), args)


def report(args: argparse.Namespace) -> None:
    from fedvlm import console, runs
    from fedvlm.report.page import page

    page(runs.find(args.runs), Path(args.out))
    console.out.print(f"page: {args.out}")


def resume(args: argparse.Namespace) -> None:
    from fedvlm import console, runs
    from fedvlm.use import setup_of

    found = runs.find(args.runs)
    for r in (waiting := [r for r in found if not r.done]):
        setup = setup_of(r.info)
        saved = r.load()
        console.out.print(f"{r.folder.name}: from round {saved[1] + 1 if saved else 0}", style="dim")
        encoded(setup)
        run_all([(setup, r.folder)], 1)
    if not waiting:
        console.out.print("nothing to resume: finished", style="dim")
    _table(found, args)


def predict(args: argparse.Namespace) -> None:
    import csv

    from fedvlm import console, runs
    from fedvlm.data.source import IMAGES
    from fedvlm.tasks import MASKS
    from fedvlm.use import from_run, load

    paths: list[Path] = []
    for given in map(Path, args.images):
        inside = sorted(p for p in given.rglob("*") if p.suffix.lower() in IMAGES) if given.is_dir() else [given]
        if not inside:
            raise FedvlmError(f"{given}: no images in that folder")
        paths += inside
    missing = [p for p in paths if not p.is_file()]
    if missing:
        raise FedvlmError(f"{missing[0]}: no such image or folder")
    exported = (Path(args.run) / "adapter.safetensors").is_file()
    model = load(args.run) if exported else from_run(runs.find([args.run])[0], args.client)
    lines: list[list[str]] = []
    with console.progress("predicting", len(paths)) as update:
        for first in range(0, len(paths), 64):
            part = paths[first : first + 64]
            lines += [[str(p), c, f"{q:.3f}", model.whose] for p, (c, q) in zip(part, model.predict(part), strict=True)]
            update(len(lines), "")
    learns = model.model.adapter.learns
    told = ["image", "class", "share" if learns is MASKS else "probability", "model"]
    console.rows(told, lines)
    if args.masks:
        if learns is not MASKS:
            raise FedvlmError(f"--masks: this model learned {learns.what} and draws none")
        Path(args.masks).mkdir(parents=True, exist_ok=True)
        for k, p in enumerate(paths):
            (mask,) = model.masks([p])
            mask.save(Path(args.masks) / f"{k:04d}-{p.stem}.png")
        console.out.print(f"{len(paths)} masks in {args.masks}")
    if args.csv:
        with Path(args.csv).open("w", newline="") as out:
            csv.writer(out).writerows([told, *lines])


def export(args: argparse.Namespace) -> None:
    from fedvlm import console, runs
    from fedvlm.use import export as write

    found = runs.find([args.run])
    if len(found) > 1:
        raise FedvlmError(f"{args.run} holds {len(found)} runs; give one of them, such as {found[0].folder}")
    folder = Path(args.out) if args.out else found[0].folder / "-".join(["export", *args.client.split()])
    written = write(found[0], folder, args.client)
    console.out.print(f"{folder}: {', '.join(written)}")


def attack(args: argparse.Namespace) -> None:
    import csv

    from fedvlm import console, runs
    from fedvlm.privacy.attack import attack as measure
    from fedvlm.privacy.attack import table, why_not
    from fedvlm.use import setup_of

    found = runs.find(args.runs)
    silent = [r for r in found if not r.info.get("reveals")]
    if len(silent) == len(found):
        raise FedvlmError(f"{found[0].folder.name}: {why_not('')}")
    for r in silent:
        console.out.print(f"{r.folder.name} is left out: {why_not('')}", style="dim")
    rows: list[dict[str, Any]] = []
    for r in (r for r in found if r not in silent):
        rows += measure(r, encoded(setup_of(r.info)), args.what_if)
    console.show(table(rows))
    if args.csv:
        with Path(args.csv).open("w", newline="") as out:
            writer = csv.DictWriter(out, list(dict.fromkeys(k for row in rows for k in row)))
            writer.writeheader()
            writer.writerows(rows)


def ls(args: argparse.Namespace) -> None:
    from fedvlm import console, parts
    from fedvlm.config import recipe, recipes

    if args.what == "methods":
        rows = []
        for plan in map(recipe, recipes()):
            rows.append([plan.name, f"{plan.adapter} × {plan.local} × {plan.merge}", *_wire(plan.name), plan.paper])
        console.rows(["method", "adapter × local × merge", "private", "KB up/client", "paper"], rows)
        console.out.print(
            "bytes for 10 classes and 512 dimensions; `fedvlm show METHOD` says what it does", style="dim"
        )
    elif args.what == "data":
        from fedvlm.data.source import open_source

        emoji = open_source("emoji")
        console.rows(
            ["data", "domains", "classes", "images"],
            [["emoji (embedded)", str(len(emoji.domains)), str(len(emoji.classes)), str(len(emoji.items))]],
        )
        console.out.print(
            "or data=FOLDER of domain/class/image or class/image (classes), of site/image/… and site/mask/… (masks), "
            "or a .jsonl[.gz] file of {role, text} (next characters)",
            style="dim",
        )
    else:
        axis = {"adapters": "adapter", "local": "local", "merges": "merge"}[args.what]
        lines = []
        for name in parts.names(axis):
            kind = parts.find(axis, name)
            text = (sys.modules[kind.__module__].__doc__ or "").split("\n")[0]
            lines.append([name, ", ".join(f.name for f in fields(kind)), text])
        console.rows([axis, "keys", "what"], lines)


def _wire(name: str) -> list[str]:
    """What a method keeps private and what it sends, at a common size."""
    import torch

    from fedvlm.adapters.base import Task
    from fedvlm.adapters.network import Network
    from fedvlm.config import resolve
    from fedvlm.core import nbytes
    from fedvlm.local.copies import COPY
    from fedvlm.method import Method

    setup = resolve(name, {})
    if setup.adapter.needs:  # its size is the backbone's
        return ["–", "of the tower"]
    task = Task(tuple(map(str, range(10))), torch.zeros(10, 512), 512, 100.0)
    with torch.device("meta") if isinstance(setup.adapter, Network) else nullcontext():  # shapes are enough
        method = Method.build(setup.adapter, setup.local, setup.merge, task)
    own = ["a copy" if k.startswith(COPY) else k for k in method.newcomer]
    return [
        ", ".join(dict.fromkeys(own)) or "–",
        f"{(nbytes(method.initial) + method.extra * method.trains) / 1e3:.3g}",
    ]


def show(args: argparse.Namespace) -> None:
    from fedvlm import console
    from fedvlm.config import pairs, resolve

    given = pairs(args.pairs)
    setup = resolve(args.method, given)
    plan = setup.recipe
    console.out.print(f"[bold]{plan.title}[/] {plan.paper}\n{plan.idea}")
    tuned = plan.tuned.get(setup.config.backbone, {}) if setup.config.settings == "tuned" else {}
    lines = []
    for axis, part in (("run", setup.config), *((a, getattr(setup, a)) for a in ("adapter", "local", "merge"))):
        kind = type(part)
        lines.append([axis if axis == "run" else f"{axis}={setup.chosen[axis]}", "", ""])
        for f in fields(kind):
            value = getattr(part, f.name)
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            home = (
                "command line"
                if f.name in given
                else "validation"
                if f.name in tuned
                else "recipe"
                if f.name in plan.settings
                else ""
            )
            lines.append([f"  {f.name}", text, home])
    console.rows(["key", "value", "from"], lines)
    for name, numbers in plan.published.items():
        shown = ", ".join(f"{k} {v}" for k, v in numbers.items() if k != "source")
        console.out.print(f"published on {name}: {shown} ({numbers.get('source', '')})", style="dim")


def cache(args: argparse.Namespace) -> None:
    from fedvlm import console
    from fedvlm.data import store

    if args.prune:
        for name in store.prune(args.older, args.views):
            console.out.print(f"removed {name}")
    lines = [
        [
            e["view"],
            str(e["segments"]),
            f"{e['bytes'] / 1e6:.1f} MB",
            time.strftime("%Y-%m-%d", time.localtime(e["used"])),
        ]
        for e in store.listing()
    ]
    console.rows(["view", "segments", "size", "last written"], lines)
    console.out.print(f"at {store.home()} (FEDVLM_CACHE)", style="dim")


def doctor(args: argparse.Namespace) -> None:
    from fedvlm import console
    from fedvlm.doctor import examine

    broken = 0
    for finding in examine():
        mark = {"ok": "[green]ok    [/]", "note": "[yellow]note  [/]", "broken": "[red]broken[/]"}[finding.state]
        console.out.print(f"{mark} {finding.what}" + (f" → {finding.fix}" if finding.fix else ""))
        broken += finding.state == "broken"
    if broken:
        raise FedvlmError(f"{broken} thing{'s' * (broken > 1)} to put right, see above")


def encode_server(args: argparse.Namespace) -> None:
    from fedvlm import backbones, console
    from fedvlm.backbones.server import serve
    from fedvlm.config import coerce, pairs
    from fedvlm.errors import nearest

    kinds: dict[str, type] = {
        "backbone": str,
        "host": str,
        "port": int,
        "texts": bool,
        "limit_images": int,
        "limit_bytes": int,
    }
    given = {"backbone": "mini-clip", "port": "8801"} | pairs(args.pairs)
    for key in given:
        if key not in kinds:
            raise FedvlmError(f"{key}= is not a key here; {nearest(key, kinds)}")
    options = {k: coerce(k, v, kinds[k]) for k, v in given.items()}
    token = os.environ.get("FEDVLM_TOKEN")
    with serve(backbones.load(options.pop("backbone")), token=token, **options) as server:
        console.out.print(f"serving at {server.url} ({'token required' if token else 'no token'}); Ctrl-C ends it")
        server.wait()


def demo(args: argparse.Namespace) -> None:
    from fedvlm import console
    from fedvlm.config import pairs, resolve
    from fedvlm.demo import DEFAULTS, METHODS, conclude

    began = time.monotonic()
    setups = [resolve(m, DEFAULTS | pairs(args.pairs)) for m in METHODS]
    runs = run_all(jobs_of(setups), setups[0].config.jobs)
    _table(runs, args)
    conclude(runs, Path(setups[0].config.out) / "demo.png")
    console.out.print(f"{time.monotonic() - began:.0f} s in all", style="dim")
