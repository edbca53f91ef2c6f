"""Base-to-novel (FedDTL 2026, App. B): half of the classes are trained on, the other half is only scored at the end.

local: a client's model on the test images of the classes it trains on; base: on those of all classes that anybody trains
on; novel: on those of classes that nobody trains on, from their names; hm = 2·base·novel / (base + novel). Means over
clients. Base and local images are classified among all base classes, novel ones among the novel classes. Our reading of
local, from Table 1: under IID it equals base to the last digit for every method, so all images of a client's classes count
and not its share of them; under Non-IID zero-shot CLIP's local is its base within 0.6 points, so the classes a client does
not have are still candidates.

These are means over images, as published. base_macro, novel_macro, hm_macro are means over classes, each with the same
weight: on unbalanced data (Caltech101) one large class can decide the mean over images.
"""

from __future__ import annotations

import numpy as np
import torch

from fedvlm.core.cohort import Cohort
from fedvlm.core.records import MEASURES, Number, RoundRecord, Scores
from fedvlm.core.state import Message
from fedvlm.data.clients import Federation
from fedvlm.errors import NoQuorum
from fedvlm.rounds.method import Method

MACRO = ("base_macro", "novel_macro", "hm_macro")
Correct = dict[str, np.ndarray]  # "base", "novel" → correctly classified examples of each class, [clients, classes]


def base_to_novel(method: Method, federation: Federation, cohort: Cohort, message: Message) -> RoundRecord:
    """Scores by view, and at the top level those of the personal models; novel is null for adapters without an open
    vocabulary. The shared model is the same for everybody, so one client's answer serves for all."""
    data = federation.data
    able = np.flatnonzero(data.counts("train")[: federation.scored] > 0)
    able = able[~np.isin(able, federation.unseen)]
    held = data.class_counts(len(federation.task.classes)) > 0
    labels = {half: data.extras[half].y for half in ("base", "novel")}
    sizes = {half: torch.bincount(y).numpy() for half, y in labels.items() if y is not None}
    found: dict[str, Scores] = {}
    if method.has_shared_model:
        answer = first_answer(cohort, able, "novel.shared", message)
        correct = {k: v.repeat(len(able), 0) for k, v in answer.items()}
        found["shared"] = measures(correct, held[able].numpy(), sizes)
        found["personal"] = found["shared"]  # where nothing is private, everybody's own model is the shared one
    if method.has_personal_models:
        reply = cohort.ask_some(able, "novel.personal", message)
        correct = {k: v.double().numpy() for k, v in reply.values.items()}
        found["personal"] = measures(correct, held[reply.ids].numpy(), sizes)
    top = found["personal"]
    return {
        "base_to_novel": found,
        "local": top["local"],
        "base": top["base"],
        "novel": top["novel"],
        "hm": top["hm"],
        "base_macro": top["base_macro"],
        "novel_macro": top["novel_macro"],
        "hm_macro": top["hm_macro"],
    }


def first_answer(cohort: Cohort, ids: np.ndarray, step: str, message: Message) -> Correct:
    """The answer of the first client that gives one."""
    for k, i in enumerate(ids):
        try:
            reply = cohort.ask_some(ids[k : k + 1], step, message)
            return {name: v.double().numpy() for name, v in reply.values.items()}
        except NoQuorum:
            if i == ids[-1]:
                raise
    raise ValueError("there are no clients to ask")


def measures(correct: Correct, held: np.ndarray, sizes: dict[str, np.ndarray]) -> Scores:
    """held [clients, base classes]: which classes a client trains on; sizes: test images of each class."""
    own = (sizes["base"] * held).sum(1)
    local = (correct["base"] * held).sum(1)[own > 0] / own[own > 0]  # a class of few images may have none to test
    base, novel = (
        float(correct[h].sum(1).mean() / sizes[h].sum()) if h in correct else None for h in ("base", "novel")
    )
    macro = tuple(mean_over_classes(correct[h], sizes[h]) if h in correct else None for h in ("base", "novel"))
    values = (float(local.mean()) if len(local) else None, base, novel, harmonic(base, novel), *macro, harmonic(*macro))
    return {k: None if v is None else round(v, 6) for k, v in zip((*MEASURES, *MACRO), values, strict=True)}


def mean_over_classes(correct: np.ndarray, sizes: np.ndarray) -> float:
    """The mean accuracy over clients and classes that have test images."""
    tested = sizes > 0
    return float((correct[:, tested] / sizes[tested]).mean())


def harmonic(one: Number, other: Number) -> Number:
    if one is None or other is None:
        return None
    return 2 * one * other / (one + other) if one + other else 0.0
