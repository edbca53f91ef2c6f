"""A model's folder, in Hugging Face format or in open_clip's: which files must be there, and what identifies the model.

Nothing in it is ever run: weights are read from .safetensors files only, and `trust_remote_code` is off.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict, cast

from fedvlm.core.records import parsed, read_text
from fedvlm.errors import FedvlmError
from fedvlm.system.allowed import absolute
from fedvlm.system.names import printable

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")
MINI_CLIP_TOKENIZER = "0e5f4fb3280d5e93"  # not in its fingerprint, which stores and recipes refer to
PREPROCESSING = ("preprocessor_config.json", "processor_config.json")
OPEN_CLIP = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"
INDEX = "*.index.json"  # which of several files has which weights
KERNELS = (
    "attn_implementation",
    "quantization_config",
    "kernel_config",
)  # entries that choose code, which may be fetched
BUILT_IN = (None, False, True, "eager", "sdpa")
# what numbers of a configuration may be at most, by parts of their names: they decide how much memory a model takes
LARGEST = {"layers": 512, "heads": 1024, "size": 1 << 23, "dim": 1 << 18, "embeddings": 1 << 20}
LARGEST |= {"length": 1 << 20, "experts": 1024}
PIXELS = ("image_size", "shortest_edge", "height", "width")
MOST_PIXELS = 4096  # of an edge
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FETCHED = ["*.json", "*.safetensors", "*.txt"]
CONVERT = (
    "python -c \"import torch, safetensors.torch as s; s.save_file({{k: v.clone() for k, v in torch.load('{old}', "
    "weights_only=True).items()}}, '{new}')\""
)


def folder_of(name: str, fetch: bool) -> Path:
    """The model's local folder; `fetch`: from the hub."""
    folder = Path(absolute(name))
    if not fetch and not os.path.isdir(folder):  # noqa: PTH112 (Path's raises for a name that is too long)
        raise FedvlmError(
            f"backbone={name}: no such folder; give mini-clip, a folder in Hugging Face or open_clip format, a hub name "
            "(owner/model), onnx:FILE, http(s)://…, python:module:function, or pixels:SIZE"
        )
    if fetch:
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, allow_patterns=FETCHED))
        except Exception as error:
            raise FedvlmError(
                f"backbone={name}: cannot be fetched from the hub ({type(error).__name__}). Offline, copy the model's "
                "folder here and give its path (backbone=path/to/model), or use the bundled backbone=mini-clip"
            ) from error
    if not (folder / "config.json").is_file() and not (folder / OPEN_CLIP).is_file():
        raise FedvlmError(
            f"backbone={name}: no config.json and no {OPEN_CLIP} in that folder; it must be in Hugging Face format or "
            "in open_clip's"
        )
    check_weights(name, folder)
    check_entries(name, folder)
    return folder


def check_entries(name: str, folder: Path) -> None:
    """An error where a file of the folder leads out of it, asks for code from elsewhere, or for sizes that no model has."""
    for path in (p for p in sorted(folder.glob("*.json")) if p.name in ("config.json", OPEN_CLIP, *PREPROCESSING)):
        try:
            entries = list(nested(parsed(read_text(path))))
        except (OSError, ValueError) as error:
            raise FedvlmError(f"backbone={name}: {path.name} is not readable ({error})") from error
        for key, value in entries:
            if key.strip("_") in KERNELS and not (isinstance(value, str | bool | None) and value in BUILT_IN):
                raise FedvlmError(f"backbone={name}: {path.name} has {key}={value!r:.80}, which asks for other code")
            most = most_of(key)
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not -most <= number <= most:
                    raise FedvlmError(f"backbone={name}: {path.name} has {key}={number:g}, and {most:,} is the most")
    for path in sorted(folder.glob(INDEX)):
        try:
            named = cast(dict[str, str], parsed(read_text(path))["weight_map"]).values()
            odd = [file for file in named if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file, re.ASCII)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FedvlmError(f"backbone={name}: {path.name} is not readable ({type(error).__name__})") from error
        if odd:
            raise FedvlmError(f"backbone={name}: {path.name} names {odd[0]!r:.80}, and weights are files of the folder")


def most_of(key: str) -> float:
    """The most that a number of a configuration may be."""
    return MOST_PIXELS if key in PIXELS else next((n for k, n in LARGEST.items() if k in key), math.inf)


def nested(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """The entries of plain data at any depth."""
    yield key, value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from nested(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, dict | list):
                yield from nested(inner)


def check_weights(name: str, folder: Path) -> None:
    """An error where there is no .safetensors file to read."""
    wanted = OPEN_CLIP_WEIGHTS if is_open_clip(folder) else "model.safetensors"
    if (folder / wanted).is_file() or (not is_open_clip(folder) and list(folder.glob("*.safetensors"))):
        return
    found = (path.name for pattern in PICKLES for path in sorted(folder.glob(pattern)))
    # a file's name becomes part of a command, so it must not hold anything that would be run
    old = next((file for file in found if re.fullmatch(r"[\w.-]+", file, re.ASCII)), "")
    how = f"convert it once, in that folder: {CONVERT.format(old=old, new=wanted)}"
    raise FedvlmError(
        f"backbone={name}: no {wanted}; "
        + (f"{old} is a pickle, which can run code when it is read: {how}" if old else "copy the model's weights there")
    )


def is_open_clip(folder: Path) -> bool:
    """Whether the folder is read as open_clip's; many are in both formats, and then Hugging Face's is used."""
    if not (folder / OPEN_CLIP).is_file():
        return False
    config = folder / "config.json"
    return not (config.is_file() and read_config(folder).get("model_type") and list(folder.glob("model*.safetensors")))


class VisionConfig(TypedDict, total=False):
    image_size: int
    patch_size: int
    hidden_size: int
    num_hidden_layers: int


class ModelConfig(TypedDict, total=False):
    """The entries of config.json that are read here."""

    model_type: str
    projection_dim: int
    hidden_size: int
    hidden_sizes: list[int]
    vision_config: VisionConfig


def read_config(folder: Path) -> ModelConfig:
    try:
        found = parsed(read_text(folder / "config.json"))
        kinds = {"model_type": str, "projection_dim": int, "hidden_size": int, "hidden_sizes": list}
        for key, kind in (kinds | {"vision_config": dict}).items():
            if not isinstance(found.get(key, kind()), kind):
                raise ValueError(f"{key} is {found[key]!r:.80}")
        return cast(ModelConfig, found)
    except (OSError, ValueError) as error:
        raise FedvlmError(f"backbone={folder}: config.json is not readable ({error})") from error


@contextlib.contextmanager
def loading(folder: Path) -> Iterator[None]:
    try:
        yield
    except FedvlmError:  # says what is wrong already; within another message it would be shortened
        raise
    except Exception as error:  # whatever the files make transformers raise
        reason = f"{type(error).__name__}: {printable(error, 200)}"
        if mixed := mixed_install():
            raise FedvlmError(f"backbone={folder}: does not load ({reason}); {mixed}") from error
        raise FedvlmError(
            f"backbone={folder}: does not load ({reason}); is it complete, and in its own format?"
        ) from error


def mixed_install() -> str:
    """What is wrong where torchvision is of another version of torch, which breaks transformers; "" where nothing is."""
    if importlib.util.find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        why = f"{type(error).__name__}: {printable(error, 100)}"
        return (
            f"torchvision {version('torchvision')} does not fit torch {version('torch')} ({why}), and fedvlm does not need "
            "it: pip uninstall torchvision"
        )
    return ""


def fingerprint(folder: Path) -> str:
    """A hash of the weights, the configuration and the preprocessing; a tokenizer other than mini-clip's counts too."""
    weights, settings = sorted(folder.glob("*.safetensors")), ["config.json", *PREPROCESSING]
    weights += sorted(folder.glob(INDEX))
    if is_open_clip(folder):
        weights, settings = [folder / OPEN_CLIP_WEIGHTS], [OPEN_CLIP]
    digest = _hash([*weights, *(folder / name for name in settings)])
    tokenizer = _hash([folder / name for name in TOKENIZER])
    if tokenizer.hexdigest() not in (MINI_CLIP_TOKENIZER, _hash([]).hexdigest()):
        digest.update(tokenizer.digest())
    return digest.hexdigest()


def _hash(files: list[Path]) -> hashlib.blake2b:
    there = [file for file in files if file.is_file()]
    return _hash_as_of(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in there)).copy()


@lru_cache(maxsize=16)
def _hash_as_of(files: tuple[tuple[Path, int, int], ...]) -> hashlib.blake2b:
    """Hash files with their size and time, so that large ones are read once in a process as long as they stay as they
    are."""
    digest = hashlib.blake2b(digest_size=8)
    for file, *_ in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 24):
                digest.update(chunk)
    return digest
