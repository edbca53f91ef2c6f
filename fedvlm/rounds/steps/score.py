"""Scoring: every metric of the run, on each client's own examples and on extra ones, for the shared and the personal view.

Each view's model is prepared once and each example is predicted once per view. Statistics go up, never predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.adapter import PREPARED, HasDetectionScores
from fedvlm.core.data import SPLITS, Data, Extra
from fedvlm.core.detection import SCORES, scores_of
from fedvlm.core.metric import Additive, ClientView, PerClient
from fedvlm.core.model import Model
from fedvlm.core.schema import Field, Fields, Schema
from fedvlm.core.state import Answer, Message, Params, aligned
from fedvlm.rounds.steps.base import Step
from fedvlm.rounds.steps.predict import Predictor, model_at, one_model, one_per_client, sums

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method


class ScoreStep(Step):
    def schema(self, method: Method, extras: Mapping[str, Extra]) -> Schema:
        values: Fields = {"count": Field((3,), low=1, high=1, per="split", whole=True)}  # just what a client declared
        for name, metric in method.metrics_for(extras).items():
            low, high = metric.limits
            shape, per = metric.shape(method.model), ""
            if isinstance(metric, Additive):
                shape, per = (shape, "test") if metric.extra else ((3, *shape), "split")
            values |= {f"{view}.{name}": Field(shape, low, high, per) for view in method.views}
        return Schema(values)

    @torch.no_grad()
    def prepare(self, method: Method, message: Message) -> Params:
        """The shared model's text features."""
        if not method.has_shared_model:
            return {}
        found = method.adapter.prepare(method.task, method.shared_model(message), {})
        return {k: v for k, v in found.items() if k.startswith(PREPARED)}

    @torch.no_grad()
    def run(self, method: Method, own: Params, message: Message, data: Data, prepared: Params) -> Answer:
        count = torch.from_numpy(np.diff(data.bounds, axis=1)).to(data.dtype)
        values: Params = {"count": count}
        before: Params = {}
        for view in method.views:
            if view == "shared":
                params = method.shared_model(message) | prepared
                predict: Predictor = one_model
            else:
                params, predict = method.personal_models(own, message, data), one_per_client
            if view == "personal" or not prepared:
                params = method.adapter.prepare(method.task, params, before)
            values |= {f"{view}.{k}": v for k, v in statistics(method, params, predict, data).items()}
            before = params
        return Answer(own, values)


def statistics(method: Method, params: Params, predict: Predictor, data: Data) -> Params:
    """Statistics by metric: [clients, 3, *shape] on the clients' own splits, [clients, *shape] on extra examples."""
    model, cells, found = method.model, 3 * len(data), dict[str, Tensor]()
    metrics = method.metrics_for(data.extras)
    for extra in dict.fromkeys(m.extra for m in metrics.values() if isinstance(m, Additive)):
        chosen = {k: m for k, m in metrics.items() if isinstance(m, Additive) and m.extra == extra}
        examples, versions = (scored(data), 1) if not extra else aligned_test(data, extra)
        totals = sums(model, predict(model, params, examples), list(chosen.values()), cells)
        found |= {k: t[:, 2] / versions if extra else t for k, t in zip(chosen, totals, strict=True)}
    whole = {k: m for k, m in metrics.items() if isinstance(m, PerClient)}
    if whole:
        views = client_views(model, params, data, same_for_all=predict is one_model)
        rows = [{k: m.client(view) for k, m in whole.items()} for view in views]
        found |= {k: torch.stack([row[k] for row in rows]) for k in whole}
    return {k: found[k] for k in metrics}


def scored(data: Data) -> Data:
    """The examples that models are scored on; the sums over training examples stay 0."""
    return replace(data, bounds=data.bounds[:, [1, 1, 2, 3]])


def aligned_test(data: Data, extra: str) -> tuple[Data, int]:
    """The extra versions of the clients' test examples as data, and how many versions of an example there are."""
    x = data.extras[extra].x
    versions, test = x.shape[1], data.bounds[:, [2, 2, 2, 3]]
    return replace(data, x=x.flatten(0, 1), y=data.y.repeat_interleave(versions, 0), bounds=versions * test), versions


def client_views(model: Model, params: Params, data: Data, same_for_all: bool) -> list[ClientView]:
    """What metrics per client see; predictions are made when asked for, and those of one model on public extra examples
    once for all clients."""

    def predictions(i: int) -> ClientView:
        one = model_at(params, i)

        def examples(name: str) -> tuple[Tensor, Tensor | None]:
            if name in data.extras:
                return aligned(data.extras[name].x), data.extras[name].y
            at = SPLITS.index(name)
            low, high = int(data.bounds[i, at]), int(data.bounds[i, at + 1])
            return data.part(low, high), data.y[low:high]

        def blocks(name: str) -> tuple[Tensor, ...]:
            x = examples(name)[0]
            return torch.split(x, model.adapter.limits.examples) if len(x) else ()

        @lru_cache
        def logits(name: str) -> Tensor:
            found = [model.logits(one, x[None])[0] for x in blocks(name)]
            return torch.cat(found) if found else torch.zeros(0, len(model.task.classes))

        @lru_cache
        def scores(name: str) -> dict[str, Tensor]:
            found = [detection_scores(model, one, x[None]) for x in blocks(name)]
            return {k: torch.cat([f[k][0] for f in found]) if found else torch.zeros(0) for k in SCORES}

        def labels(name: str) -> Tensor:
            y = examples(name)[1]
            assert y is not None, f"extra examples '{name}' have no labels"
            return y

        return ClientView(model, logits, labels, scores)

    views = [predictions(i) for i in range(len(data))]
    if not same_for_all or not views:
        return views
    first = views[0]

    def once(view: ClientView) -> ClientView:
        return replace(
            view,
            logits_of=lambda name: (first if name in data.extras else view).logits(name),
            scores_of=lambda name: (first if name in data.extras else view).detection_scores(name),
        )

    return [first, *(once(v) for v in views[1:])]


def detection_scores(model: Model, params: Params, x: Tensor) -> dict[str, Tensor]:
    """How surely x is of one of the classes, by score, [clients, examples]: the adapter's own scores where it has
    some."""
    if isinstance(model.adapter, HasDetectionScores):
        return model.adapter.detection_scores(model.task, params, x)
    return scores_of(model.logits(params, x))
