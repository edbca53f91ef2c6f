"""FedDTL's client (2026, §3.3): supervised training first, then reinforcement learning.

Stage 2 begins when the server sends a reference model. Stage 1 is cross-entropy (local=sgd). In stage 2 the classes are
actions: with the parameters π_old from the beginning of the batch and noise σ on the embedding before normalisation, G
actions per image are drawn from the softmax. The reward is 1 where the action is the label; the advantage is
A = (r − mean)/(std + 1e-4) within the group of G, 0 where all rewards are equal. Then `updates` steps on

    − mean_ij ( min[ρA, clip(ρ, 1 − ε, 1 + ε) A] − β KL ),   ρ = π(a|x) / π_old(a|x, noise)

KL to the reference is Eq. 9's estimate at the actions (kl=sampled; biased here, since actions are drawn from the noisy
π_old) or the sum over classes (kl=exact). σ is absolute, as published; with relative_noise=true it is the length of the
noise as a share of the embedding's length (which is 24 on mini-clip, where an absolute 0.1 is a share of 0.07). Other
algorithms (D.4) replace the first term: dr-grpo has no std and sums over the batch; dapo has a higher upper clip;
lite-ppo takes the std over the batch; gmpo takes, for each of the G draws, a geometric mean over the batch, here
separately over examples with A > 0 and A < 0 (Eq. 15 as printed is 0 as soon as one A is 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, HasRawEmbedding, class_vectors
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import Count, NotNegative, Share
from fedvlm.core.seeds import generator
from fedvlm.core.state import Message, Params, with_client_axis
from fedvlm.errors import FedvlmError

REINFORCED = "reinforced"  # the stage in which a reference model comes with the message
EPS = 1e-4  # added to a standard deviation


class DrawnActions(NamedTuple):
    """The actions drawn for a batch, [clients, group, examples] each, and the reference's log-probabilities."""

    actions: Tensor
    old: Tensor  # log π_old of each action, with its noise
    advantage: Tensor
    reference: Tensor  # log-probabilities of the reference model, [clients, examples, classes]


@dataclass(frozen=True)
class TwoStage(Local):
    actions: Count = 3  # G, actions drawn per image in stage 2
    updates: Count = 3  # steps per batch in stage 2
    noise: NotNegative = 0.1  # σ of the noise on the embedding when actions are drawn; 0: none
    relative_noise: bool = False  # true: `noise` is its length as a share of the embedding's; false: absolute
    clip: Share = 0.2  # ε, the ratio ρ is clipped to 1 − ε … 1 + ε
    clip_high: NotNegative = 0.28  # ε of the upper bound, for dapo and gmpo
    kl_weight: NotNegative = 0.5  # β, weight of the KL to the reference model; 0: none
    kl: Literal["sampled", "exact"] = "sampled"  # the KL is estimated at the actions (Eq. 9), or summed over classes
    algorithm: Literal["grpo", "dr-grpo", "gmpo", "dapo", "lite-ppo"] = "grpo"  # the objective of stage 2 (D.4)

    effects: ClassVar[Mapping[str, str]] = {
        "clipped": "stage 2: share of actions whose ratio is clipped; 0 in stage 1",
        "flat": "stage 2: share of images whose actions all have the same reward, hence no advantage; 0 in stage 1",
    }

    def __post_init__(self) -> None:
        if self.actions < 1 or self.updates < 1 or self.noise < 0:
            raise FedvlmError(
                f"actions={self.actions} and updates={self.updates} must be at least 1, noise={self.noise:g} not negative"
            )

    def incompatible(self, adapter: Adapter) -> str:
        able = isinstance(adapter, HasRawEmbedding) and adapter.alignment == "images"
        return "" if able else "needs embeddings before they are normalised; use adapter=lora towers=image (or both)"

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        zeros = torch.zeros(len(data), dtype=data.dtype, device=data.x.device)
        sums = {"clipped": zeros, "flat": zeros.clone()}
        if message.stage != REINFORCED:
            return super().fit(model, params, message, own, data) | sums
        gradients = self.reinforce(model, with_client_axis(message.reference), data, sums)
        loss = optimise(replace(self, epochs=1), params, data, gradients, self.updates)
        steps = data.tensor(np.maximum(1, -(-data.counts("train") // self.batch)) * self.updates)
        return {"loss": loss} | {k: v / steps for k, v in sums.items()}

    def reinforce(self, model: Model, reference: Params, data: Data, sums: Params) -> Gradients:
        """The gradients of stage 2: actions are drawn once per batch and used for all its updates. Adds, per step, the
        share of clipped ratios and of images without advantage to `sums`."""
        latest: list[tuple[Batch, DrawnActions]] = []

        @torch.enable_grad()
        def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            if not latest or latest[-1][0] is not batch:
                with torch.no_grad():
                    latest[:] = [(batch, self.sample(model, now, now | reference, batch, data))]
            sample = latest[-1][1]
            leaves = {k: v.detach().requires_grad_() for k, v in now.items()}
            policy = model.adapter.train_logits(model.task, leaves, batch).log_softmax(-1)
            each, clipped = self.policy_loss(policy, sample, batch)
            n = len(batch.y)
            sums["clipped"][:n] += clipped
            sums["flat"][:n] += batch.mean((sample.advantage == 0).all(1).to(batch.weight.dtype))
            return each.detach(), torch.autograd.grad(each.sum(), list(leaves.values()))

        return gradients

    def sample(self, model: Model, old: Params, reference: Params, batch: Batch, data: Data) -> DrawnActions:
        """Draws the actions of a batch from the policy with parameters `old`."""
        adapter, task = model.adapter, model.task
        assert isinstance(adapter, HasRawEmbedding)  # see `incompatible`
        embedding = adapter.embed(task, old, batch.x)
        noise, uniform = random_numbers(batch, data, self.actions, embedding.shape[-1], embedding)
        length = embedding.norm(dim=-1, keepdim=True)[:, None]
        size = length / embedding.shape[-1] ** 0.5 if self.relative_noise else 1.0
        noisy = F.normalize(embedding[:, None] + self.noise * size * noise, dim=-1)
        log_p = (task.scale * noisy @ class_vectors(adapter, task, old)[:, None].mT).log_softmax(-1)
        below = log_p.exp().cumsum(-1) <= uniform[..., None]  # the inverse of the cumulative distribution
        actions = below.sum(-1).clamp(max=log_p.shape[-1] - 1)
        log_p_old = log_p.gather(-1, actions[..., None])[..., 0]
        reward = (actions == batch.y[:, None]).to(log_p.dtype)
        log_p_reference = adapter.train_logits(task, reference, batch).log_softmax(-1)
        return DrawnActions(actions, log_p_old, self.advantage(reward, batch.weight), log_p_reference)

    def advantage(self, reward: Tensor, weight: Tensor) -> Tensor:
        """A of rewards [clients, group, examples]; `weight` [clients, examples] is 0 for padding."""
        centred = reward - reward.mean(1, keepdim=True)
        if self.algorithm == "dr-grpo":
            return centred
        if self.algorithm == "lite-ppo":  # std over all actions of the batch, without padding
            share = weight[:, None] / reward.shape[1]
            mean = (reward * share).sum((1, 2), keepdim=True)
            n = ((weight > 0).sum(-1) * reward.shape[1])[:, None, None]
            variance = (reward - mean).square().mul(share).sum((1, 2), keepdim=True) * n / (n - 1).clamp(min=1)
            return centred / (variance.sqrt() + EPS)
        std = reward.std(1, keepdim=True) if reward.shape[1] > 1 else torch.zeros_like(centred[:, :1])
        return centred / (std + EPS)

    def policy_loss(self, policy: Tensor, sample: DrawnActions, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the share of actions whose ratio is clipped, one number per client each. `policy` is log π
        [clients, examples, classes]."""
        log_p = policy.gather(-1, sample.actions.transpose(1, 2)).transpose(1, 2)
        ratio = (log_p - sample.old).exp()
        high = self.clip_high if self.algorithm in ("dapo", "gmpo") else self.clip
        clipped = ratio.clamp(1 - self.clip, 1 + high)
        gain = torch.minimum(ratio * sample.advantage, clipped * sample.advantage)
        share = batch.weight[:, None] / gain.shape[1]
        mean = signed_geometric_mean(gain, share) if self.algorithm == "gmpo" else (gain * share).sum((1, 2))
        loss = self.kl_weight * (self.kl_divergence(policy, log_p, sample) * share).sum((1, 2)) - mean
        if self.algorithm == "dr-grpo":
            loss = loss * (batch.weight > 0).sum(-1)
        return loss, ((ratio != clipped) * share).sum((1, 2)).detach()

    def kl_divergence(self, policy: Tensor, log_p: Tensor, sample: DrawnActions) -> Tensor:
        """KL to the reference per action, [clients, group, examples]; `log_p` is log π of the actions."""
        if self.kl == "exact":
            return (policy.exp() * (policy - sample.reference)).sum(-1)[:, None].expand_as(log_p)
        reference = sample.reference.gather(-1, sample.actions.transpose(1, 2)).transpose(1, 2)
        return (reference - log_p).exp() - (reference - log_p) - 1


def signed_geometric_mean(gain: Tensor, share: Tensor) -> Tensor:
    """Σ over the G draws and both signs: sign × share of the examples × the geometric mean of their |gain|."""
    total = torch.zeros_like(gain[:, 0, 0])
    for sign in (1, -1):
        weight = ((sign * gain) > 0) * share
        part = weight.sum(2)
        log_mean = (weight * (sign * gain).clamp(min=torch.finfo(gain.dtype).tiny).log()).sum(2) / part.clamp(min=1e-12)
        total = total + sign * (part * log_mean.exp()).sum(1)
    return total


def random_numbers(batch: Batch, data: Data, group: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Normal numbers [clients, group, examples, dim] and uniform ones [clients, group, examples], seeded by client and
    step; `like` gives device and dtype."""
    size = batch.y.shape[1]
    normal, uniform = [], []
    for i in data.ids[: len(batch.y)]:
        rng = generator(data.seed, data.round, 67, batch.step, int(i))
        normal.append(torch.randn(group, size, dim, generator=rng))
        uniform.append(torch.rand(group, size, generator=rng))
    return torch.stack(normal).to(like), torch.stack(uniform).to(like)
