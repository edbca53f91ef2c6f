"""How long the page takes, how large it is and what a browser says of it: `python benchmarks/page.py`.

    python benchmarks/page.py --pictures FOLDER --axe axe.min.js     # `npm pack axe-core`; pip install playwright; chromium

The run folders are made up; see `written`. Pictures are at 1440 × 900 and 390 × 844, light and dark. A page over its
budget, with a violation of axe-core's rules, or wider than its window ends with 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save

from fedvlm.core.records import (
    BackboneRecord,
    ClientScores,
    DataRecord,
    MethodRecord,
    PartRecord,
    Result,
    RoundRecord,
    RunRecord,
)
from fedvlm.report.page import PageOptions, page
from fedvlm.training.folder import RunFolder

SHARED = PartRecord("mean")


def written(root: Path, method: str, seed: int, unseen: str, clients: list[str], rounds: int) -> RunFolder:
    """A run folder with random scores, weights and gaps, in the form that training writes."""
    draw = np.random.default_rng([seed, *method.encode()])
    skill = 0.5 + 0.3 * draw.random(len(clients))
    records: list[RoundRecord] = []
    for k in range(0 if method == "zero-shot" else rounds, -1, -1):
        score = np.clip(skill * (1 - np.exp(-(rounds - k + 2 + 4 * draw.random()) / 8)), 0, 1).round(6).tolist()
        own: dict[str, ClientScores] = {
            n: {"shared": {"test": s}} | ({} if n == unseen else {"personal": {"test": s}})  # type: ignore[misc]
            for n, s in zip(clients, score, strict=True)
        }
        trained = [n for n in clients if n != unseen]
        mean = float(np.mean([own[n]["personal"]["test"] or 0 for n in trained]))
        record: RoundRecord = {
            "round": rounds - k,
            "clients": own,
            "personal": {"test": mean},
            "shared": {"test": mean},
        }
        record |= {"G": own[unseen]["shared"]["test"], "P": mean, "asked": len(trained), "seconds": 1.0}
        record |= {"bytes_up": 10_000, "bytes_down": 10_000}
        record |= {"gap_variance": float(draw.random())} if method == "fft-gp" else {}
        if method == "fft-gp":  # which is about its weights
            record["weights"] = dict(zip(trained, draw.dirichlet(np.ones(len(trained))).tolist(), strict=True))
        records.append(record)
    result = Result(
        records[-1], records[-1], {"shared": 9, "private": 0}, 10_000 * rounds, 10_000 * rounds, 9.0, [unseen]
    )
    record_of_run = RunRecord(
        identity=f"{method}-{unseen}-{seed}",
        method=MethodRecord(method),
        adapter=PartRecord("head"),
        local=PartRecord("sgd"),
        merge=SHARED,
        config={"rounds": rounds, "seed": seed, "unseen": [unseen], "split": [60, 20, 20], "protocol": "one"},
        given={},
        data=DataRecord("made-up", "f", "accuracy", 1000, clients[:10], ["a", "b"]),
        backbone=BackboneRecord("tiny", "1", 4, 1.0),
        clients=clients,
        result=result,
    )
    run = RunFolder(root / record_of_run.identity)
    run.write("run.json", replace(record_of_run, homes={c: c for c in clients}).to_json().encode())
    for one in records:
        run.append(one)
    return run


METHODS = (
    *("zero-shot", "moments", "fedot", "fedavg", "fedclip", "ditto", "fedprox", "fft-gp", "local-only", "promptfl"),
    *("fedlora", "scaffold", "focoop", "feddtl", "fedbabu", "fedrep", "lg-fedavg", "knn-per", "fedlt", "afl"),
)


def made(root: Path, methods: int, seeds: int, clients: int, targets: int = 1, rounds: int = 50) -> list[RunFolder]:
    """Each method with so many seeds and held-out clients."""
    names = [f"client-{k:03}" for k in range(clients)]
    each = [(m, s, u) for m in METHODS[:methods] for s in range(seeds) for u in names[:targets]]
    return [written(root, m, s, u, names, rounds) for m, s, u in each]


def with_outputs(runs: list[RunFolder], each: int = 20) -> list[RunFolder]:
    """Random answers to so many test images of each client."""
    for seed, run in enumerate(runs):
        draw, classes = np.random.default_rng(seed), len(run.record.data.classes)
        client = np.repeat(np.arange(len(run.record.clients)), each)
        found = {"client": client, "label": draw.integers(0, classes, len(client)), "item": np.arange(len(client))}
        for view in ("shared", "personal"):
            found[f"{view}.logits"] = draw.normal(size=(len(client), classes))
            found[f"{view}.features"] = draw.normal(size=(len(client), 64))
        run.write("outputs.safetensors", save(found))
    return runs


class Case(NamedTuple):
    make: Callable[[Path], list[RunFolder]]
    options: PageOptions = PageOptions()
    most_kb: int = 0  # the budget that issue and design give
    most_seconds: float = 0  # of CPU


DETAILS = PageOptions(details=True)
CASES = {
    "2 methods, 4 clients, one seed": Case(lambda root: made(root, 2, 1, 4)),
    "8 methods, 4 clients, one seed": Case(lambda root: made(root, 8, 1, 4)),
    "8 methods x 21 runs, 7 clients": Case(lambda root: made(root, 8, 3, 7, targets=7), most_kb=150, most_seconds=1),
    "20 methods, 100 clients, one seed": Case(lambda root: made(root, 20, 1, 100)),
    "12 methods x 12 runs, details": Case(lambda root: with_outputs(made(root, 12, 3, 4, 4, 100)), DETAILS, 500, 3),
    "4 methods, 500 clients, details": Case(lambda root: with_outputs(made(root, 4, 3, 500)), DETAILS),
}
SIZES = ((1440, 900), (390, 844))


def looked_at(pages: dict[str, Path], folder: Path, axe: Path | None) -> list[str]:
    """Pictures of each page in a browser; what is wrong with them."""
    from playwright.sync_api import sync_playwright

    faults = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, path in pages.items():
            for width, height in SIZES:
                for scheme in ("light", "dark"):
                    context = browser.new_context(bypass_csp=True, color_scheme=scheme)  # type: ignore[arg-type]
                    tab = context.new_page()
                    tab.set_viewport_size({"width": width, "height": height})
                    tab.goto(path.as_uri())
                    tab.screenshot(path=folder / f"{path.stem}-{width}-{scheme}.png")
                    if tab.evaluate("document.documentElement.scrollWidth") > width:
                        faults.append(f"{name}: wider than {width} pixels")
                    tab.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
                    if axe:
                        tab.add_script_tag(path=axe)
                        found = tab.evaluate("axe.run()")["violations"]
                        faults += [
                            f"{name}, {width}, {scheme}: {f['id']} ({f['nodes'][0]['html'][:90]})" for f in found
                        ]
                    context.close()
        browser.close()
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="write pictures of the pages to this folder")
    parser.add_argument("--axe", type=Path, help="axe.min.js, which looks for faults of accessibility")
    args = parser.parse_args()
    faults, pages = [], dict[str, Path]()
    with tempfile.TemporaryDirectory() as folder:
        page(made(Path(folder) / "first", 2, 1, 2), Path(folder) / "first.html")  # imports are not counted
        for k, (name, case) in enumerate(CASES.items()):
            runs, path = case.make(Path(folder) / str(k)), Path(folder) / f"{k}.html"
            used = time.process_time()
            page(runs, path, case.options)
            took, size = time.process_time() - used, path.stat().st_size / 1000
            budget = f" (at most {case.most_seconds:g} s, {case.most_kb} kB)" if case.most_kb else ""
            print(f"{name}: {took:.2f} CPU s, {size:.0f} kB{budget}", flush=True)
            pages[name] = path
            if case.most_kb and (size > case.most_kb or took > case.most_seconds):
                faults.append(f"{name}: over its budget")
        if args.pictures:
            args.pictures.mkdir(parents=True, exist_ok=True)
            faults += looked_at(pages, args.pictures, args.axe)
            looked = len(pages) * len(SIZES) * 2
            print(
                f"{looked} views in a browser" + (", each by axe-core" if args.axe else "") + f": {len(faults)} faults"
            )
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
