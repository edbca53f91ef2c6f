"""The weights of a model's folder, and how exactly they must fit the module that computes the model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from safetensors import safe_open
from torch import Tensor, nn

from fedvlm.core.records import parsed, read_text
from fedvlm.core.state import Params, aligned
from fedvlm.errors import FedvlmError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors or, where the weights are in several files, those of the folder that its index names."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    named = cast(dict[str, str], parsed(read_text(folder / INDEX))["weight_map"])
    return sorted({folder / Path(name).name for name in named.values()})


def read_weights(files: Iterable[Path]) -> Params:
    """Weights in float32, each where torch puts a new tensor: products may round otherwise where their input begins
    elsewhere in memory, as weights do that lie elsewhere in their file."""
    found: Params = {}
    for file in files:
        with safe_open(file, "pt") as weights:
            found |= {name: aligned(weights.get_tensor(name).float()) for name in weights.keys()}  # noqa: SIM118
    return found


def fill(module: nn.Module, weights: Params, name: str) -> None:
    """Exactly these weights into the module, or an error: something left over would be a part that is not computed."""
    expected = module.state_dict()
    weights = {k: _same_shape(v, expected.get(k)) for k, v in weights.items()}
    wrong = sorted(k for k in expected.keys() & weights.keys() if expected[k].shape != weights[k].shape)
    counters = {k for k in expected.keys() - weights.keys() if k.endswith("num_batches_tracked")}
    lacking = sorted(expected.keys() - weights.keys() - counters)
    for what, keys in (
        ("lack", lacking),
        ("also hold", sorted(weights.keys() - expected.keys())),
        ("differ in", wrong),
    ):
        if keys:
            raise FedvlmError(
                f"backbone={name}: its weights {what} {keys[0]}"
                + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
                + ", so it is not of the layout that its configuration describes, or not of one that is known here"
            )
    module.load_state_dict(weights, strict=False, assign=any(p.is_meta for p in module.parameters()))
    module.train(False)
    module.requires_grad_(False)


def _same_shape(value: Tensor, like: Tensor | None) -> Tensor:
    """A scalar, such as the logit scale, has one dimension in some models."""
    return value.reshape(like.shape) if like is not None and value.numel() == like.numel() == 1 else value
