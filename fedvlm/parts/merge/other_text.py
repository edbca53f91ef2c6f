"""FedDTL's server with another CLIP's text tower (2026, D.7, Table 11): the clients' image tower is the backbone's own.

`text_backbone` names the other CLIP. Its embeddings have another length or another basis, so that a linear map P to the
image embeddings' space follows, t = P t′/‖P t′‖, which the server trains with the text tower. P starts as torch.nn.Linear
does (our reading; the paper says that a linear layer is added), and as the identity where text_backbone="": the
backbone's own text tower, so that round 0 is zero-shot there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Start
from fedvlm.core.model import Model
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, State, linear
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.layered import towers_of
from fedvlm.parts.adapters.lora import Lora
from fedvlm.parts.merge.text_server import TOWER, TextServer
from fedvlm.towers.text import TextTower

PROJECTION = TOWER + "projection"


@dataclass(frozen=True)
class Projected(Lora):
    """Lora on a text tower, and a trained map of its embeddings."""

    identity: bool = False

    def init(self, task: Task, seed: int) -> Params:
        inputs = towers_of(task).text.projection.shape[0]
        bound = (2 * torch.rand(task.dim, inputs, generator=generator(seed, 89)) - 1) / inputs**0.5
        return super().init(task, seed) | {PROJECTION: torch.eye(task.dim) if self.identity else bound}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        embeddings = super().class_vectors(task, params)
        return F.normalize(linear(embeddings, params[PROJECTION].to(embeddings)), dim=-1)


@dataclass(frozen=True)
class OtherText(TextServer):
    text_backbone: str = ""  # the CLIP whose text tower the server trains; "": the run's own

    def text_adapter(self, adapter: Adapter) -> Projected:
        own = super().text_adapter(adapter)
        return Projected(**{f.name: getattr(own, f.name) for f in fields(Lora)}, identity=not self.text_backbone)

    def init(self, model: Model, clients: int, seed: int) -> Start:
        return super().init(self.with_text_tower(model), clients, seed)

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        return super().round(self.with_text_tower(model), state, cohort)

    def with_text_tower(self, model: Model) -> Model:
        """The model on a task whose text tower is the other one's."""
        if not self.text_backbone:
            return model

        def changed(task: Task) -> Task:
            text = load_text_tower(self.text_backbone).to(device=task.names().device)
            novel = None if task.novel is None else changed(task.novel)
            return task._replace(tower=towers_of(task)._replace(text=text), novel=novel)

        return replace(model, task=changed(model.task))


@lru_cache(maxsize=2)
def load_text_tower(name: str) -> TextTower:
    from fedvlm import backbones

    usual = backbones.form_of(name) in ("bundled", "folder", "hub")
    found = getattr(backbones.load(name), "text_tower", None) if usual else None
    if not isinstance(found, TextTower):
        raise FedvlmError(f"text_backbone={name} has no text tower; use a CLIP in Hugging Face format")
    return found
