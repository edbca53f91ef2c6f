"""own.py's table variants: what of moments is a choice, by images that no other table tests.

All images that are test images under any of own.py's seeds are left out first; what is left (about a third) is split anew
60/20/20, by other seeds, and each variant is run and scored on that alone: G and P on PACS and emoji, each domain held out
in turn; the shared and the personal model on Caltech101, 4 shots, each class with one of 10 clients, or Dirichlet 0.5. The
last column, the mean of all of them, is the criterion. The first line is the recipe; each other line changes what it says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedvlm.config.config import Setup, resolve
from fedvlm.data.clients import federate
from fedvlm.data.pool import Pool, Pools
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.planning import LEAVE_ONE_OUT, single_runs

if TYPE_CHECKING:
    from own import Study

SEEDS = (301, 302, 303)
POOLS = Pools()  # of this process
DATA: dict[str, tuple[str, dict[str, object]]] = {
    "pacs": ("pacs", {"protocol": LEAVE_ONE_OUT}),
    "emoji": ("emoji", {"protocol": LEAVE_ONE_OUT}),
    "disjoint": ("caltech", {"partition": "disjoint", "clients": 10, "shots": 4}),
    "dirichlet": ("caltech", {"partition": "dirichlet", "alpha": 0.5, "clients": 10, "shots": 4}),
}
VARIANTS: dict[str, dict[str, object]] = {
    "the recipe": {},
    "averaging=0": {"averaging": 0},
    "averaging=1": {"averaging": 1},
    "averaging=4": {"averaging": 4},
    "choose=both": {"choose": "both"},
    "choose=newcomers": {"choose": "newcomers"},
    "choose=clients": {"choose": "clients"},
    "towards=1": {"towards": (1,)},
    "saturation=0": {"saturation": 0},
    "saturation=4": {"saturation": 4},
    "saturation=16": {"saturation": 16},
    "saturation=0 weights=size": {"saturation": 0, "weights": "size"},
    "balance=false": {"balance": False},
    "balance=false weights=size": {"balance": False, "weights": "size"},
    "strengths down to 0.0001": {"strengths": (100, 30, 10, 3, 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)},
    "texts=0": {"texts": (0,)},
    "solver=ridge priors=0": {"solver": "ridge", "priors": (0,)},
    "adapter=named": {"adapter": "named", "solver": "ridge", "priors": (0,)},
    "fourier=256": {"fourier": 256},
}


def variants_table(study: Study, table: str) -> tuple[list[str], list[list[str]]]:
    given = {name: study.places[data] for name, (data, _) in DATA.items() if study.places[data]}
    cells = {(v, d): f"variant-{d}-{v.replace(' ', '-')}" for v in VARIANTS for d in given}
    waiting = {key: name for key, name in cells.items() if not study.measured.knows(name)}
    if waiting and not study.args.read:
        with ProcessPoolExecutor(study.args.jobs or None, get_context("spawn")) as processes:
            asked = {k: processes.submit(scored, *k, given[k[1]], tuple(study.args.seeds)) for k in waiting}
            for key, answer in asked.items():
                study.measured(waiting[key], answer.result)
    lines = []
    for variant in VARIANTS:
        found = [study.measured(cells[variant, d], partial(dict)) for d in given]
        if all(found):
            values = [v for one in found for v in one.values()]
            lines.append([variant, *(f"{100 * v:.2f}" for v in [*values, float(np.mean(values))])])
    named = [f"{d}: {w}" for d in given for w in (("G", "P") if d in ("pacs", "emoji") else ("shared", "personal"))]
    return ["variant", *named, "mean"], lines


def scored(variant: str, name: str, place: str, tested: Sequence[int]) -> dict[str, float]:
    """Shared and personal accuracy of a variant on images that no seed of `tested` tests; mean over seeds and targets."""
    torch.set_num_threads(1)
    setup = resolve("moments", {"data": place, "seeds": SEEDS, **DATA[name][1], **VARIANTS[variant]})
    pool = untested(POOLS.encode(setup), setup, tested)
    found = []
    for one in single_runs(setup, pool):
        with tempfile.TemporaryDirectory() as folder:
            last = train.train(PlannedRun(one, pool, Path(folder, "run"))).record.finished.last
        new = last["G"] if one.config.unseen else last["shared"]["test"]
        found.append([new, last["P"] if one.config.unseen else last["personal"]["test"]])
    shared, personal = np.array(found, dtype=float).mean(0)
    return {"shared": float(shared), "personal": float(personal)}


def untested(pool: Pool, setup: Setup, seeds: Sequence[int]) -> Pool:
    kept = np.ones(len(pool.x), dtype=bool)
    for seed in seeds:
        federation = federate(pool, setup.config, seed)
        for low, high in federation.data.bounds[:, 2:]:
            kept[federation.items[low:high]] = False
    rows = np.flatnonzero(kept)
    source = replace(pool.source, items=[pool.source.items[i] for i in rows])
    twins = None
    if pool.twins is not None:
        _, first, found = np.unique(pool.twins[rows], return_index=True, return_inverse=True)
        twins = first[found]
    return replace(pool, source=source, x=pool.x[torch.from_numpy(rows)], twins=twins)
