"""A method is an adapter (what is trained), a local rule (how a client trains) and a merge (what the server does)."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch

from fedvlm.core.adapter import PREPARED, Adapter, HasSharedTwin, Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.copies import COPY
from fedvlm.core.data import Data
from fedvlm.core.local import Local
from fedvlm.core.merge import Merge, any_device
from fedvlm.core.metric import Metric
from fedvlm.core.model import Model
from fedvlm.core.schema import Field, Fields
from fedvlm.core.state import EFFECT, Message, Params, State, with_client_axis
from fedvlm.errors import FedvlmError
from fedvlm.parts.metrics.auroc import Auroc
from fedvlm.parts.metrics.corrupted import Corrupted
from fedvlm.parts.metrics.fpr95 import Fpr95
from fedvlm.parts.metrics.loss import Loss
from fedvlm.parts.metrics.score import Score
from fedvlm.privacy.mechanism import Privacy

RESERVED = (COPY, PREPARED)  # prefixes of names in private rows and of prepared parameters
METRICS: dict[str, Metric] = {
    "score": Score(),
    "loss": Loss(),
    "corrupted": Corrupted(),
    "auroc": Auroc(),
    "fpr95": Fpr95(),
}


@dataclass(frozen=True)
class Method:
    adapter: Adapter
    local: Local
    merge: Merge
    task: Task
    seed: int = 0
    newcomer: Params = field(default_factory=dict, compare=False)  # the private row of a client that never trained
    initial: Params = field(default_factory=dict, compare=False)  # the shared parameters at the start
    metrics: dict[str, Metric] = field(default_factory=lambda: dict(METRICS), compare=False)
    privacy: Privacy | None = None  # differential privacy (dp=); None: without

    TRAINED: ClassVar[str] = COPY + "trained"  # in a private row: 1 once the client has trained (see `or_shared`)

    @classmethod
    def build(
        cls,
        adapter: Adapter,
        local: Local,
        merge: Merge,
        task: Task,
        seed: int = 0,
        metrics: dict[str, Metric] | None = None,
        privacy: Privacy | None = None,
    ) -> Method:
        """The method, or an error that says why these parts do not work together."""
        check_combination(adapter, local, merge, task)
        params = adapter.init(task, seed)
        adapter = with_private_names(adapter, params)
        check_parameters(adapter, merge, params)
        shared = {k: v for k, v in params.items() if k not in adapter.private}
        newcomer = {k: v for k, v in params.items() if k in adapter.private} | local.private_state(shared)
        method = cls(adapter, local, merge, task, seed, newcomer, shared, METRICS | (metrics or {}), privacy)
        if method.has_shared_twin:
            newcomer[cls.TRAINED] = torch.zeros(())
        return method

    @cached_property
    def model(self) -> Model:
        return Model(self.adapter, self.task)

    @property
    def parts(self) -> tuple[object, ...]:
        return (self.adapter, self.local, self.merge, *self.metrics.values())

    @property
    def trains(self) -> bool:
        return bool(self.initial or self.newcomer)

    @cached_property
    def has_shared_model(self) -> bool:
        """False where everything that is trained is private."""
        return bool(self.initial) or not self.newcomer

    @cached_property
    def has_personal_models(self) -> bool:
        """Whether a client's own model differs from the shared one."""
        return bool(self.newcomer) or self.local.adapts

    @cached_property
    def has_shared_twin(self) -> bool:
        """Whether private parameters have shared counterparts, which new clients use."""
        return isinstance(self.adapter, HasSharedTwin) and bool(self.adapter.private)

    @property
    def merges_anywhere(self) -> bool:
        """Whether the merge works on shared parameters on a GPU."""
        return self.privacy is None and any_device.is_on(type(self.merge).round)

    @cached_property
    def views(self) -> tuple[str, ...]:
        return ("shared",) * self.has_shared_model + ("personal",) * self.has_personal_models

    @cached_property
    def uploads(self) -> Fields:
        """What goes up in training beside the shared parameters."""
        found = self.local.uploads(self.task, self.initial) | self.merge.uploads(self.task)
        for observer in self.merge.observers:
            found |= observer.uploads
        if self.privacy:
            found |= self.privacy.uploads
        else:  # what training did to a client is about its data
            found |= {EFFECT + name: Field() for name in self.local.effects}
        for name, given in found.items():
            if not isinstance(given, Field):
                raise FedvlmError(
                    f"uploads: '{name}' is {given!r}; say fedvlm.core.schema.Field({given!r}) and its limits"
                )
        return found

    @property
    def upload_bytes(self) -> int:
        """The size of `uploads` for one client; values of any length are left out."""
        return 4 * sum(math.prod(f.shape) for f in self.uploads.values() if -1 not in f.shape)

    @cached_property
    def base_and_novel(self) -> dict[str, Task]:
        """The tasks to score under base-to-novel: base classes and, for adapters with an open vocabulary, novel
        ones."""
        if self.task.novel is None:
            return {}
        return {"base": self.task} | ({"novel": self.task.novel} if self.adapter.open_vocabulary else {})

    def metrics_for(self, extras: Collection[str]) -> dict[str, Metric]:
        """The metrics that apply to this task type and to data with these extra examples."""
        kind = self.adapter.task_type
        return {k: m for k, m in self.metrics.items() if kind in m.task_types and m.extra in ("", *extras)}

    def shared_model(self, message: Message) -> Params:
        """The shared model, as a new client uses it."""
        row = with_client_axis(self.newcomer)
        return self.or_shared(row, self.local.personal(row, with_client_axis(message.shared)))

    def personal_models(self, own: Params, message: Message, data: Data) -> Params:
        """Each client's own model."""
        return self.or_shared(own, self.local.adapt(self.model, own, with_client_axis(message.shared), data))

    def or_shared(self, own: Params, params: Params) -> Params:
        """Use the shared counterparts of private parameters for clients that never trained."""
        if not (self.has_shared_twin and isinstance(self.adapter, HasSharedTwin)):
            return params
        trained, twin = own[self.TRAINED] > 0, self.adapter.shared_only(params)
        changed = {k: v for k, v in twin.items() if v is not params[k]}  # shared parameters keep a client axis of one
        return params | {
            k: torch.where(trained.view(-1, *[1] * (v.dim() - 1)), params[k], v) for k, v in changed.items()
        }

    def for_message(self, message: Message) -> Method:
        """A copy of the method with the class embeddings from the message."""
        return replace(self, task=self.task.with_text(message.task)) if message.task else self

    def to(self, device: torch.device) -> Method:
        newcomer, initial = ({k: v.to(device) for k, v in p.items()} for p in (self.newcomer, self.initial))
        return replace(self, task=self.task.to(device), newcomer=newcomer, initial=initial)

    def init(self, clients: int) -> State:
        start = self.merge.init(self.model, clients, self.seed)
        server: Params = {}
        for observer in self.merge.observers:
            server |= observer.init(clients)
        server |= start.server | (self.privacy.server_state() if self.privacy else {})
        return State(dict(self.initial), dict(self.newcomer), server, start.task)

    def round(self, state: State, cohort: Cohort) -> State:
        if self.privacy and self.privacy.level == "client":
            return self.privacy.round(self.merge, self.model, state, cohort)
        cohort.observers = tuple(observer(state) for observer in self.merge.observers)
        after = self.merge.round(self.model, state, cohort)
        for observer in cohort.observers:
            cohort.notes |= observer.notes()
            after = after._replace(server=after.server | observer.kept)
        if self.privacy:
            cohort.notes.pop("loss", None)  # it stays with the clients
        return after


def check_combination(adapter: Adapter, local: Local, merge: Merge, task: Task) -> None:
    """An error where these parts do not work together."""
    uploads = local.uploads(task, {})
    missing = [n for n in merge.requires if n not in (*uploads, *merge.uploads(task))]
    if missing:
        raise FedvlmError(
            f"merge={name_of(merge)} needs uploads named {', '.join(missing)}, and local={name_of(local)} sends "
            f"{', '.join(uploads) or 'none'}; use merge=mean, or a local rule that sends them"
        )
    if local.partner not in ("", name_of(merge)) or merge.partner not in ("", name_of(local)):
        one, other = ("local", local.partner) if local.partner else ("merge", merge.partner)
        raise FedvlmError(
            f"{one}={other} works only together with {'merge' if one == 'local' else 'local'}={other}: they exchange "
            "what no other part knows; give both"
        )
    for axis, reason in (("local", local.incompatible(adapter)), ("merge", merge.incompatible(adapter))):
        if reason:
            part = local if axis == "local" else merge
            raise FedvlmError(f"{axis}={name_of(part)} does not go with adapter={name_of(adapter)}: it {reason}")
    if local.objective not in adapter.task_type.losses:
        raise FedvlmError(
            f"objective={local.objective}: adapter={name_of(adapter)} learns {adapter.task_type.description}, and its "
            f"loss is {', '.join(adapter.task_type.losses)}"
        )


def with_private_names(adapter: Adapter, params: Params) -> Adapter:
    """The adapter with each pattern in its `private` (*.B) replaced by the parameters that fit it."""
    if not any("*" in n for n in adapter.private):
        return adapter
    names = [k for n in adapter.private for k in (fnmatch.filter(params, n) or [n])]
    return replace(adapter, private=tuple(dict.fromkeys(names)))


def check_parameters(adapter: Adapter, merge: Merge, params: Params) -> None:
    unknown = [n for n in adapter.private if n not in params]
    if unknown:
        raise FedvlmError(
            f"private={','.join(unknown)}: adapter={name_of(adapter)} has no such parameter; "
            f"it has {', '.join(params) or 'none'}"
        )
    for name in params:
        if name.startswith(RESERVED) or "/" in name:
            raise FedvlmError(
                f"adapter={name_of(adapter)} calls a parameter '{name}'; names with / and names that start with "
                f"{' or '.join(RESERVED)} are reserved, choose another"
            )
    lacking = [n for n in merge.requires_parameters if n not in params or n in adapter.private]
    if lacking:
        raise FedvlmError(
            f"merge={name_of(merge)} works on shared parameters named {', '.join(merge.requires_parameters)}, and adapter="
            f"{name_of(adapter)} has no {', '.join(lacking)}; use merge=mean, or an adapter that has them"
        )


def name_of(part: object) -> str:
    return type(part).__module__.rsplit(".", 1)[-1]
