"""Base-to-novel (FedDTL 2026, App. B): half of the classes are trained on, the other half is only met at the end.

local: a client's model on the test images of the classes it trains on; base: on those of all classes that anybody trains
on; novel: on those of classes nobody trains on, by their names; hm = 2·base·novel / (base + novel). Means over clients.
Base and local images are told among all base classes, novel ones among the novel classes. Our reading of local, from
Table 1: under IID it equals base to the last digit for every method, so all images of a client's classes count and not its
share of them; under Non-IID zero-shot CLIP's local is its base within 0.6 points, so names are not left out for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedvlm.core import Cohort, NoQuorum, Params
from fedvlm.data.federation import Federation
from fedvlm.evaluate.protocols import MEASURES
from fedvlm.method import Method

Told = dict[str, np.ndarray]  # half → how many of each class were told, [clients, classes]


def base_to_novel(method: Method, federation: Federation, cohort: Cohort, shared: Params) -> dict[str, Any]:
    """By view, and at the top those of the clients' own models; novel is null where the adapter knows its own classes only.
    The shared model is the same for everybody, so one client's answer serves for all."""
    able = np.flatnonzero(federation.data.counts("train")[: federation.scored] > 0)
    able = able[~np.isin(able, federation.unseen)]
    held = federation.data.holds(len(federation.task.classes)) > 0
    sizes = {half: torch.bincount(y).numpy() for half, (_, y) in federation.data.halves.items()}
    found: dict[str, dict[str, float | None]] = {}
    if method.generalises:
        told = {k: v.repeat(len(able), 0) for k, v in anybody(cohort, able, "open.shared", shared).items()}
        found["shared"] = measures(told, held[able].numpy(), sizes)
        found["personal"] = found["shared"]  # where nothing is private, everybody's own model is the shared one
    if method.personalises:
        ids, up = cohort.ask_some(able, "open.personal", shared)
        found["personal"] = measures({k: v.double().numpy() for k, v in up.items()}, held[ids].numpy(), sizes)
    return {"base_to_novel": found} | found["personal"]


def anybody(cohort: Cohort, ids: np.ndarray, step: str, shared: Params) -> Told:
    """The answer of the first that gives one."""
    for k, i in enumerate(ids):
        try:
            return {name: v.double().numpy() for name, v in cohort.ask_some(ids[k : k + 1], step, shared)[1].items()}
        except NoQuorum:
            if i == ids[-1]:
                raise
    raise ValueError("there is nobody to ask")


def measures(told: Told, held: np.ndarray, sizes: dict[str, np.ndarray]) -> dict[str, float | None]:
    """held [clients, base classes]: which classes a client trains on; sizes: test images of each class."""
    own = (sizes["base"] * held).sum(1)
    local = (told["base"] * held).sum(1)[own > 0] / own[own > 0]  # classes of a few images may have none to test
    base, novel = (float(told[h].sum(1).mean() / sizes[h].sum()) if h in told else None for h in ("base", "novel"))
    values = (float(local.mean()) if len(local) else None, base, novel, harmonic(base, novel))
    return {k: None if v is None else round(v, 6) for k, v in zip(MEASURES, values, strict=True)}


def harmonic(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return None
    return 2 * one * other / (one + other) if one + other else 0.0
