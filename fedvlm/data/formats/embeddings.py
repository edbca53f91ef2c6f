"""A .safetensors file of embeddings that the user computed: `x` [n, dim], `y` [n] and metadata.

Metadata (JSON text): `classes`, the name of each label; `domains`, the name of each domain, with tensor `domain` [n];
`scale`, the logit scale. Optional tensors: `text` [classes, dim], the class names' embeddings; `group` [n], rows that stay
in one split. `fedvlm.dataset` writes such files from arrays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from fedvlm.data.columns import NumberedItems, Words, constant
from fedvlm.data.format import Format, Options
from fedvlm.data.source import NO_DOMAIN, Embeddings, Source
from fedvlm.errors import FedvlmError
from fedvlm.system import files

MAX_CLASSES = 1_000_000  # where they have no names
SCALE = 20.0  # where nothing is said: our choice for embeddings without a temperature of their own


class EmbeddingFile(Format):
    def recognises(self, name: str) -> bool:
        return name.endswith(".safetensors")

    def open(self, name: str, options: Options) -> Source:
        return open_embeddings(Path(name).expanduser())


def open_embeddings(path: Path) -> Source:
    if not path.is_file():
        raise FedvlmError(f"data={path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            about = {k: json.loads(v) for k, v in (file.metadata() or {}).items()}
            found = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise FedvlmError(f"data={path}: cannot be read as embeddings ({error})") from error
    for name in ("x", "y"):
        if name not in found:
            raise FedvlmError(f"data={path}: no tensor '{name}'; embeddings need x [n, dim] and y [n]")
    x, y = _vectors(path, "x", found["x"]), _numbers(path, "y", found["y"])
    if len(x) != len(y) or not len(y):
        raise FedvlmError(f"data={path}: x is {tuple(x.shape)} and y {tuple(y.shape)}; expected [n, dim] and [n]")
    classes = _names(path, "classes", about.get("classes", range(min(int(y.max()), MAX_CLASSES) + 1)))
    if int(y.min()) < 0 or int(y.max()) >= len(classes) or len(set(classes)) < 2:
        raise FedvlmError(f"data={path}: labels are {int(y.min())} to {int(y.max())}, for {len(classes)} classes")
    domains = _names(path, "domains", about.get("domains", [NO_DOMAIN]))
    home = _numbers(path, "domain", found.get("domain", torch.zeros(len(y), dtype=torch.int64)))
    if home.shape != y.shape or int(home.min()) < 0 or int(home.max()) >= len(domains):
        raise FedvlmError(f"data={path}: tensor 'domain' must be [n], with numbers below {len(domains)}")
    group = Words(("",), constant(len(y)))
    if "group" in found:
        group = Words.of(map(str, _numbers(path, "group", found["group"]).tolist()))
    if len(group) != len(y):
        raise FedvlmError(f"data={path}: tensor 'group' has {len(group)} numbers for {len(y)} rows")
    label = Words.coded(classes, y.numpy())
    items, present = NumberedItems(Words.coded(domains, home.numpy()), label, group), label.names
    text = found.get("text")
    if text is not None:
        if text.shape != (len(classes), x.shape[1]):
            raise FedvlmError(f"data={path}: text is {tuple(text.shape)}; expected {(len(classes), x.shape[1])}")
        text = F.normalize(_vectors(path, "text", text)[[classes.index(c) for c in present]], dim=-1)
    scale = about.get("scale", SCALE)
    if not isinstance(scale, int | float) or not 0 < scale < 1e6:
        raise FedvlmError(f"data={path}: scale={scale!r:.40} must be a positive number")
    given = Embeddings(x, text, float(scale))
    return Source(path.stem, path, items, embeddings=given)


def _vectors(path: Path, name: str, found: Tensor) -> Tensor:
    """float32 [rows, dim], neither zero nor infinite."""
    if found.dim() != 2 or found.is_complex():
        raise FedvlmError(
            f"data={path}: tensor '{name}' is {found.dtype} {tuple(found.shape)}; expected numbers [n, dim]"
        )
    norm = (x := found.float()).norm(dim=1)
    if not norm.isfinite().all() or (norm == 0).any():
        raise FedvlmError(f"data={path}: some rows of '{name}' are zero or not finite; remove them")
    return x


def _numbers(path: Path, name: str, found: Tensor) -> Tensor:
    """Whole numbers [rows]."""
    fractions = found.is_floating_point() and bool((found.long() != found).any())  # NaN is one
    if found.dim() != 1 or found.is_complex() or fractions:
        raise FedvlmError(
            f"data={path}: tensor '{name}' is {found.dtype} {tuple(found.shape)}; expected whole numbers [n]"
        )
    return found.long()


def _names(path: Path, name: str, found: object) -> list[str]:
    if not isinstance(found, list | range):
        raise FedvlmError(f"data={path}: its metadata '{name}' must be a list of names")
    return [str(n) for n in found]


def write_embeddings(
    path: Path,
    x: Tensor,
    y: Sequence[int],
    classes: Sequence[str],
    domains: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    text: Tensor | None = None,
    scale: float = SCALE,
) -> None:
    tensors = {"x": x.float().contiguous(), "y": torch.tensor(list(y))}
    about: dict[str, object] = {"classes": list(classes), "scale": scale}
    if domains is not None:
        home = Words.of(domains)
        tensors["domain"] = torch.from_numpy(home.codes)
        about["domains"] = list(home.names)
    if groups is not None:
        tensors["group"] = torch.from_numpy(Words.of(groups).codes)
    if text is not None:
        tensors["text"] = text.float().contiguous()
    files.write(path, save(tensors, {k: json.dumps(v) for k, v in about.items()}))
