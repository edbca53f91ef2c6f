"""Arrays, tensors, lists of images, torch and Hugging Face datasets in Python (fedvlm.dataset).

They are written once to the cache (images as lossless PNG in a zip of domain/class/NAME, embeddings as .safetensors), so
that everything that works with files (resuming, several processes, prediction) works with them.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvlm.data.format import Format, Options
from fedvlm.data.formats.embeddings import SCALE, write_embeddings
from fedvlm.data.formats.folder import collected, names_in_zip
from fedvlm.data.source import NO_DOMAIN, Source, existing
from fedvlm.errors import FedvlmError
from fedvlm.system import files
from fedvlm.system.machine import cache_home
from fedvlm.system.names import file_name

GROUP = r"-group-(.+)\.png$"  # in the names of files that belong to a group
Labels = Sequence[int] | Sequence[str] | np.ndarray | Tensor


class Arrays(Format):
    def recognises(self, name: str) -> bool:
        """Images of objects, in a zip of the cache; embeddings are a file of theirs."""
        return name.endswith(".zip") and Path(name).is_relative_to(cache_home() / "data")

    def open(self, name: str, options: Options) -> Source:
        root = existing(name, "data", "give the object again")
        return collected(root.stem, root, names_in_zip(root), options.group)


@dataclass(frozen=True)
class Dataset:
    """A path in the cache, for `data=`; made by `fedvlm.dataset`."""

    path: Path
    group: str = ""  # for `group=`: where the files' names say which group they belong to

    def __str__(self) -> str:
        return str(self.path)


@runtime_checkable
class HuggingFaceDataset(Protocol):
    features: Mapping[str, object]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Mapping[str, object]: ...


def dataset(
    x: object,
    labels: Labels | None = None,
    *,
    clients: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    text: object = None,
    scale: float = SCALE,
    name: str = "dataset",
) -> Dataset:
    """Data for `data=`: images or embeddings with labels.

    x: images [n, height, width, 3] or [n, 3, height, width] (uint8, or floats from 0 to 1), embeddings [n, dim], a list of
    PIL images, a torch dataset of (image, label), or a Hugging Face dataset with the columns image and label.
    labels: a number or a name for each; classes: the names of numbered labels. clients: whose each example is (a domain);
    without, `partition=` decides. groups: examples of one group (a patient) stay in one split.
    text: embeddings of the class names [classes, dim], and scale: the logit scale, where x are embeddings."""
    if labels is None:
        x, labels, classes = from_pairs(x, classes)
    y, names = numbered(labels, classes)
    domains = [str(c) for c in clients] if clients is not None else [NO_DOMAIN] * len(y)
    who = [str(g) for g in groups] if groups is not None else [""] * len(y)
    array = as_array(x)
    count = len(array) if array is not None else len(cast(Sequence[object], x))
    for what, given in (("labels", y), ("clients", domains), ("groups", who)):
        if len(given) != count:
            raise FedvlmError(f"{count} examples, and {len(given)} {what}; there must be one for each")
    if not count or len(set(y)) < 2:
        raise FedvlmError("a data set needs examples of at least two classes")
    if array is not None and array.ndim == 2:
        vectors = torch.from_numpy(np.ascontiguousarray(array))
        given_text = None if text is None else torch.as_tensor(as_array(text))
        return Dataset(store_embeddings(name, vectors, y, names, domains, groups, given_text, scale))
    images = as_images(array) if array is not None else (as_image(i) for i in cast(Iterable[object], x))
    path = store_images(name, images, [names[c] for c in y], domains, who)
    return Dataset(path, GROUP if any(who) else "")


def stored(data: object) -> Dataset:
    """The data in the cache, whatever kind of object it is."""
    if isinstance(data, Dataset):
        return data
    if isinstance(data, tuple) and len(data) in (2, 3):
        return dataset(data[0], data[1], clients=data[2] if len(data) == 3 else None)
    return dataset(data)


def from_pairs(
    data: object, classes: Sequence[str] | None
) -> tuple[list[object], list[int] | list[str], Sequence[str] | None]:
    """Examples and labels of a torch dataset of pairs or a Hugging Face dataset with the columns image and label."""
    if isinstance(data, HuggingFaceDataset) and isinstance(data.features, Mapping):
        if not {"image", "label"} <= set(data.features):
            raise FedvlmError(
                f"a Hugging Face dataset needs the columns image and label; it has {', '.join(data.features)}"
            )
        rows = [data[i] for i in range(len(data))]
        names = classes or getattr(data.features["label"], "names", None)
        return [r["image"] for r in rows], cast(list[int], [r["label"] for r in rows]), names
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, np.ndarray | Tensor | dict):
        raise FedvlmError(
            f"data: {type(data).__name__} without labels; give fedvlm.dataset(x, labels), a torch dataset of (image, "
            "label), a Hugging Face dataset, or a path"
        )
    sized = cast(Sequence[object], data)
    items, labels = list[object](), list[int]()
    for i in range(len(sized)):
        pair = sized[i]
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise FedvlmError(f"data: example {i} of {type(data).__name__} is no pair of (image, label)")
        items.append(pair[0])
        label: object = pair[1].item() if isinstance(pair[1], Tensor | np.generic) else pair[1]
        labels.append(cast(int, label))
    return items, labels, classes or getattr(data, "classes", None)


def numbered(labels: Labels, classes: Sequence[str] | None) -> tuple[list[int], list[str]]:
    """Each example's class as a number, and the names of the classes."""
    plain = cast(list[object], labels.tolist() if isinstance(labels, np.ndarray | Tensor) else list(labels))
    if any(isinstance(c, str) for c in plain):
        names = list(classes) if classes else sorted({str(c) for c in plain})
        odd = [c for c in plain if str(c) not in names]
        if odd:
            raise FedvlmError(f"label {odd[0]!r} is not among the classes {', '.join(names[:10])}")
        return [names.index(str(c)) for c in plain], names
    try:
        y = [int(cast(int, c)) for c in plain]
    except (TypeError, ValueError) as error:
        raise FedvlmError(f"labels must be numbers or names ({error})") from error
    names = [str(c) for c in classes] if classes is not None else [str(c) for c in range(max(y, default=0) + 1)]
    if min(y, default=0) < 0 or max(y, default=0) >= len(names):
        raise FedvlmError(f"labels are {min(y)} to {max(y)}, for {len(names)} classes")
    return y, names


def as_array(x: object) -> np.ndarray | None:
    """An array of all examples, where x is one."""
    if isinstance(x, Tensor):
        return x.detach().cpu().numpy()
    return x if isinstance(x, np.ndarray) else None


def as_images(array: np.ndarray) -> Iterator[Image.Image]:
    if array.ndim != 4:
        raise FedvlmError(
            f"an array of shape {array.shape}: expected images [n, height, width, 3] or [n, 3, height, width], or "
            "embeddings [n, dim]"
        )
    return (as_image(one) for one in array)


def as_image(one: object) -> Image.Image:
    if isinstance(one, Image.Image):
        return in_colour(one)
    array = as_array(one)
    if array is None or array.ndim not in (2, 3) or not array.size:
        shape = "" if array is None else f" of shape {array.shape}"
        raise FedvlmError(f"an image must be a PIL image or an array of pixels; this is {type(one).__name__}{shape}")
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.dtype != np.uint8:
        if not np.issubdtype(array.dtype, np.floating) or not (array.min() >= 0 and array.max() <= 1):
            raise FedvlmError("images must be uint8, or floats from 0 to 1 (before any normalisation)")
        array = np.rint(array * 255).astype(np.uint8)
    try:
        return in_colour(Image.fromarray(np.ascontiguousarray(array)))
    except TypeError as error:
        raise FedvlmError(f"an array of shape {array.shape} is no image; expected [height, width, 3]") from error


def in_colour(image: Image.Image) -> Image.Image:
    try:
        return image.convert("RGB")
    except Exception as error:  # one that was opened lazily is decoded only now, and may be damaged in any way
        raise FedvlmError(f"an image of {image.width}×{image.height} pixels cannot be decoded ({error})") from error


def store_images(
    name: str, images: Iterable[Image.Image], labels: list[str], domains: list[str], groups: list[str]
) -> Path:
    """A zip of domain/class/NUMBER.png, named by its content; the group is part of the file's name (see `group=`)."""
    seen, members = hashlib.blake2b(digest_size=8), list[tuple[str, bytes]]()
    flat = set(domains) == {NO_DOMAIN}
    for k, (image, label, domain, group) in enumerate(zip(images, labels, domains, groups, strict=True)):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        tail = f"{k:07d}" + (f"-group-{file_name(group)}" if group else "")
        path = f"{file_name(label)}/{tail}.png" if flat else f"{file_name(domain)}/{file_name(label)}/{tail}.png"
        seen.update(path.encode() + buffer.getvalue())
        members.append((path, buffer.getvalue()))
    target = place(name, seen.hexdigest(), ".zip")
    if not target.exists():
        with files.replaced(target) as out, zipfile.ZipFile(out, "w") as box:
            for path, data in members:
                box.writestr(path, data)
    return target


def store_embeddings(
    name: str,
    x: Tensor,
    y: list[int],
    classes: list[str],
    domains: list[str],
    groups: Sequence[str] | None,
    text: Tensor | None,
    scale: float,
) -> Path:
    seen = hashlib.blake2b(digest_size=8)
    for part in (x.numpy().tobytes(), repr((y, classes, domains, groups, scale)).encode()):
        seen.update(part)
    seen.update(b"" if text is None else text.float().numpy().tobytes())
    target = place(name, seen.hexdigest(), ".safetensors")
    if not target.exists():
        part_file = target.with_suffix(".part")
        write_embeddings(part_file, x, y, classes, domains, groups, text, scale)
        part_file.replace(target)
    return target


def place(name: str, mark: str, suffix: str) -> Path:
    folder = cache_home() / "data" / mark
    with files.writing(folder, "set FEDVLM_CACHE to another folder"):
        files.cache_folder(folder)
    return folder / f"{file_name(name)}{suffix}"
