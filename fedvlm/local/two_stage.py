"""FedDTL's client (2026, §3.3): supervised training first; once the server sends a reference model, reinforcement.

Stage 1 is cross-entropy (local=sgd). In stage 2 an image's classes are actions: with the policy of the batch's beginning,
noise σ on the embedding before it is normalised, G actions are drawn from the noisy probabilities; reward 1 where the
action is the label; advantage A = (r − mean)/(std + 1e-4) within the group, 0 where all rewards are alike. Then `updates`
steps on

    − mean_ij ( min[ρA, clip(ρ, 1 − ε, 1 + ε) A] − β KL ),   ρ = π(a|x) / π_old(a|x, noise)

KL to the reference is Eq. 9's estimate at the actions (kl=sampled; biased here, since actions come from the noisy old
policy) or the sum over classes (kl=exact). σ is absolute, as published; relative=true makes it the noise's length as a
share of the embedding's (which is 24 on mini-clip, where an absolute 0.1 is a share of 0.07). Other algorithms (D.4)
replace the first term: dr-grpo has no std and sums over the batch; dapo clips higher above; lite-ppo takes the std over
the batch; gmpo, for each of the G draws, a geometric mean over the batch, here of examples with A > 0 and A < 0 apart
(Eq. 15 as printed is 0 once one A is).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Adapter, HasRawEmbedding, Task, class_vectors
from fedvlm.core import Batch, Data, FedvlmError, Message, Params, with_client_axis
from fedvlm.local.base import Local, Shapes
from fedvlm.local.descent import Gradients, optimise
from fedvlm.local.model import Model
from fedvlm.seeds import generator

REINFORCED = "reinforced"  # the stage in which a reference model comes with the message
LEAST = 1e-4  # added to a standard deviation


class Sample(NamedTuple):
    """What a batch's old policy did: [clients, group, examples] each, and the reference's log-probabilities."""

    actions: Tensor
    old: Tensor  # log π_old of the action, with its noise
    advantage: Tensor
    reference: Tensor  # [clients, examples, classes]


@dataclass(frozen=True)
class TwoStage(Local):
    actions: int = 3  # G, drawn for each image
    updates: int = 3  # a batch, in stage 2
    wander: float = 0.1  # σ of the noise on the embedding
    relative: bool = False  # whether that is the noise's length as a share of the embedding's
    clip: float = 0.2  # ε
    clip_high: float = 0.28  # ε above 1, for dapo and gmpo
    tie: float = 0.5  # β, the weight of the KL
    kl: Literal["sampled", "exact"] = "sampled"
    algorithm: Literal["grpo", "dr-grpo", "gmpo", "dapo", "lite-ppo"] = "grpo"

    def __post_init__(self) -> None:
        if self.actions < 1 or self.updates < 1 or self.wander < 0:
            raise FedvlmError(
                f"actions={self.actions} and updates={self.updates} must be at least 1, wander={self.wander:g} not negative"
            )

    def incompatible(self, adapter: Adapter) -> str:
        able = isinstance(adapter, HasRawEmbedding) and adapter.alignment == "images"
        return "" if able else "needs embeddings before they are normalised; use adapter=lora towers=image (or both)"

    def uploads(self, task: Task, shared: Params) -> Shapes:
        return super().uploads(task, shared) | {"clipped": (), "flat": ()}

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        nothing = torch.zeros(len(data), dtype=data.dtype, device=data.x.device)
        if message.stage != REINFORCED:
            return super().fit(model, params, message, own, data) | {"clipped": nothing, "flat": nothing.clone()}
        count = {"clipped": nothing, "flat": nothing.clone()}
        gradients = self.reinforce(model, with_client_axis(message.reference), data, count)
        loss = optimise(replace(self, epochs=1), params, data, gradients, self.updates)
        steps = data.tensor(np.maximum(1, -(-data.counts("train") // self.batch)) * self.updates)
        return {"loss": loss} | {k: v / steps for k, v in count.items()}

    def reinforce(self, model: Model, reference: Params, data: Data, count: Params) -> Gradients:
        """Samples when a batch is new, then descends on what was sampled; `count` gathers what is told."""
        kept: list[tuple[Batch, Sample]] = []

        @torch.enable_grad()
        def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            if not kept or kept[-1][0] is not batch:
                with torch.no_grad():
                    kept[:] = [(batch, self.sample(model, now, now | reference, batch, data))]
            sample = kept[-1][1]
            leaves = {k: v.detach().requires_grad_() for k, v in now.items()}
            policy = model.adapter.train_logits(model.task, leaves, batch).log_softmax(-1)
            each, clipped = self.objective_of(policy, sample, batch)
            n = len(batch.y)
            count["clipped"][:n] += clipped
            count["flat"][:n] += batch.mean((sample.advantage == 0).all(1).to(batch.weight.dtype))
            return each.detach(), torch.autograd.grad(each.sum(), list(leaves.values()))

        return gradients

    def sample(self, model: Model, old: Params, reference: Params, batch: Batch, data: Data) -> Sample:
        adapter, task = model.adapter, model.task
        assert isinstance(adapter, HasRawEmbedding)  # see `incompatible`
        clean = adapter.embed(task, old, batch.x)
        noise, dice = draws(batch, data, self.actions, clean.shape[-1], clean)
        length = clean.norm(dim=-1, keepdim=True)[:, None]
        size = length / clean.shape[-1] ** 0.5 if self.relative else 1.0
        noisy = F.normalize(clean[:, None] + self.wander * size * noise, dim=-1)
        chances = (task.scale * noisy @ class_vectors(adapter, task, old)[:, None].mT).log_softmax(-1)
        below = chances.exp().cumsum(-1) <= dice[..., None]
        actions = below.sum(-1).clamp(max=chances.shape[-1] - 1)
        taken = chances.gather(-1, actions[..., None])[..., 0]
        reward = (actions == batch.y[:, None]).to(chances.dtype)
        apart = adapter.train_logits(task, reference, batch).log_softmax(-1)
        return Sample(actions, taken, self.advantage(reward, batch.weight), apart)

    def advantage(self, reward: Tensor, weight: Tensor) -> Tensor:
        """Of rewards [clients, group, examples]."""
        away = reward - reward.mean(1, keepdim=True)
        if self.algorithm == "dr-grpo":
            return away
        if self.algorithm == "lite-ppo":  # over all actions of the batch, padding left out
            share = weight[:, None] / reward.shape[1]
            mean = (reward * share).sum((1, 2), keepdim=True)
            many = ((weight > 0).sum(-1) * reward.shape[1])[:, None, None]
            spread = (reward - mean).square().mul(share).sum((1, 2), keepdim=True) * many / (many - 1).clamp(min=1)
            return away / (spread.sqrt() + LEAST)
        spread = reward.std(1, keepdim=True) if reward.shape[1] > 1 else torch.zeros_like(away[:, :1])
        return away / (spread + LEAST)

    def objective_of(self, policy: Tensor, sample: Sample, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, one number a client, and the share of actions whose ratio is cut off. `policy` is log π [clients,
        examples, classes]."""
        now = policy.gather(-1, sample.actions.transpose(1, 2)).transpose(1, 2)
        ratio = (now - sample.old).exp()
        high = self.clip_high if self.algorithm in ("dapo", "gmpo") else self.clip
        cut = ratio.clamp(1 - self.clip, 1 + high)
        gain = torch.minimum(ratio * sample.advantage, cut * sample.advantage)
        share = batch.weight[:, None] / gain.shape[1]
        won = geometric(gain, share) if self.algorithm == "gmpo" else (gain * share).sum((1, 2))
        loss = self.tie * (self.apart(policy, now, sample) * share).sum((1, 2)) - won
        if self.algorithm == "dr-grpo":
            loss = loss * (batch.weight > 0).sum(-1)
        return loss, ((ratio != cut) * share).sum((1, 2)).detach()

    def apart(self, policy: Tensor, now: Tensor, sample: Sample) -> Tensor:
        if self.kl == "exact":
            return (policy.exp() * (policy - sample.reference)).sum(-1)[:, None].expand_as(now)
        there = sample.reference.gather(-1, sample.actions.transpose(1, 2)).transpose(1, 2)
        return (there - now).exp() - (there - now) - 1


def geometric(gain: Tensor, share: Tensor) -> Tensor:
    """Σ over draws and both signs of sign × their share × the geometric mean of |gain| over the batch."""
    total = torch.zeros_like(gain[:, 0, 0])
    for sign in (1, -1):
        mine = ((sign * gain) > 0) * share
        part = mine.sum(2)
        size = (mine * (sign * gain).clamp(min=torch.finfo(gain.dtype).tiny).log()).sum(2) / part.clamp(min=1e-12)
        total = total + sign * (part * size.exp()).sum(1)
    return total


def draws(batch: Batch, data: Data, group: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Normal numbers [clients, group, examples, dim] and uniform ones [clients, group, examples], by client and step."""
    size = batch.y.shape[1]
    noise, dice = [], []
    for i in data.ids[: len(batch.y)]:
        source = generator(data.seed, data.round, 67, batch.step, int(i))
        noise.append(torch.randn(group, size, dim, generator=source))
        dice.append(torch.rand(group, size, generator=source))
    return torch.stack(noise).to(like), torch.stack(dice).to(like)
