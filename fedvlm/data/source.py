"""Data sources: the list of examples, each with its domain and class, and their bytes. What lists and reads them is a format
(`format.py`, `formats`)."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from fedvlm.core.tasks import CLASSIFICATION, TaskType
from fedvlm.data.columns import NumberedItems, column
from fedvlm.data.format import FOLDER, Options, known, named
from fedvlm.data.images import BadImage, Unreadable, read_file, read_member
from fedvlm.data.images import decode as decode
from fedvlm.data.threads import in_threads
from fedvlm.errors import FedvlmError, nearest
from fedvlm.parts.failures import explained

EMOJI = Path(__file__).parent / "assets" / "emoji.zip"
Made = TypeVar("Made")
NO_DOMAIN = "all"  # the domain of every item where the folders name none
NOT_TEXT = re.compile("[\ud800-\udfff]")  # how Python reads bytes in names that are not UTF-8
MAX_ITEMS = 20_000_000  # examples, or names in a folder: more take tens of gigabytes, and were hardly meant


@dataclass(frozen=True)
class Item:
    """An example: where its bytes are, and what is said of it."""

    path: str  # inside the source, separated by /
    domain: str
    label: str
    group: str = ""  # items of one group are kept in the same split; "": the item is a group by itself
    split: str = ""  # train, val or test, where the data come with a split: then every item has one
    client: str = ""  # who holds it, where the data say so: then every item has one


class Embeddings(NamedTuple):
    """Embeddings that the user computed, instead of images."""

    x: Tensor  # [items, dim], L2-normalised
    text: Tensor | None  # [classes, dim] in the order of the classes' names, L2-normalised
    scale: float  # logit scale


@dataclass(frozen=True)
class Source:
    """A list of examples, as a format of data makes it."""

    name: str
    root: Path  # a folder, or a zip or text file
    items: Sequence[Item]
    task_type: TaskType = CLASSIFICATION
    masks: tuple[Item, ...] = ()  # segmentation: the mask of each item, in the same order
    tokens: np.ndarray | None = None  # text: the input characters of each item, [items, characters]
    embeddings: Embeddings | None = None  # of each item, where the user computed them
    format: str = FOLDER  # which reads the bytes
    notes: tuple[str, ...] = ()  # what the user is told about how the data were understood
    tabular: bool = False  # described by a table, shards or a dataset, which may also name groups

    @property
    def domains(self) -> list[str]:
        return list(column(self.items, "domain").names)

    @property
    def classes(self) -> list[str]:
        return list(column(self.items, "label").names)

    @property
    def has_split(self) -> bool:
        """Whether the data come with their split."""
        return any(i.split for i in self.items[:1])

    def read(self) -> Iterator[tuple[int, bytes]]:
        """The index and the bytes of every file, in order; `Unreadable` where a file cannot be read."""
        return self.read_and(lambda data: data)

    def read_and(self, make: Callable[[bytes], Made]) -> Iterator[tuple[int, Made]]:
        """The index of every file and what is made of its bytes, in order; of a folder several are read at a time."""
        kind = known()[self.format]
        with explained(f"reading data={self.name}"), kind.reader(self.root) as read:

            def made(item: Item) -> Made:
                try:
                    data = read(item.path)
                except BadImage as error:
                    existing(str(self.root), "data", "it was removed while it was read")
                    data = Unreadable(str(error))
                return make(data)

            several = kind.in_threads and self.root.is_dir()
            yield from enumerate(in_threads(made, self.items) if several else map(made, self.items))


@contextmanager
def file_reader(root: Path) -> Iterator[Callable[[str], bytes]]:
    """Reads the files of a folder or a zip by their paths."""
    with nullcontext() if root.is_dir() else open_zip(root) as archive:
        yield lambda path: read_member(archive, path) if archive else read_file(root / path)


def open_source(
    name: str,
    group: str = "",
    domains: int = 0,
    stride: int = 8,
    keep: Sequence[str] = (),
    split_file: str = "",
    names: str = "",
    columns: Sequence[str] = (),
) -> Source:
    """The data of this name in the format that recognises it, or in FORMAT of FORMAT:NAME.

    `group` is a regular expression for file names (see `group_of`). `domains`, `stride` and `keep` (see `sample_domains`)
    apply to text only; images are all listed (`keep_domains` reduces them). `split_file` and `names`: see `splits.py` and
    `wording.py`. `columns`: see `formats/table.py`.
    """
    from fedvlm.data.splits import check_groups, open_split_file
    from fedvlm.data.wording import renamed

    if split_file:
        source = open_split_file(name, split_file, group)
    else:
        kind, path = named(name)
        with explained(f"opening data={name}"):
            source = replace(known()[kind].open(path, Options(group, domains, stride, keep, columns)), format=kind)
    check_groups(source)
    return renamed(source, names)


def open_outsiders(name: str) -> Source:
    """All images below a folder, in any layout; they belong to none of the task's classes."""
    from fedvlm.data.formats.folder import names_in_folder

    root = existing(name, "outsiders", "give a folder of images")
    items = tuple(Item(n, NO_DOMAIN, "outside", "") for n in names_in_folder(root)) if root.is_dir() else ()
    if not items:
        raise FedvlmError(f"outsiders={name}: no such folder, or no images in it")
    return Source(root.resolve().name, root, items)


def sample_domains(names: Iterable[str], count: int, keep: Sequence[str] = ()) -> set[str]:
    """A pseudo-random sample of `count` names (0: all), ordered by hash: the same for every seed. Names in `keep` (those
    that are held out) are always among them."""
    known = sorted(set(names), key=lambda n: (n not in keep, digest(n.encode()), n))
    if not 0 <= count <= len(known):
        raise FedvlmError(f"domains={count}: there are {len(known)}; give at most that many, or 0 for all")
    return set(known[:count] if count else known)


def keep_domains(source: Source, count: int, keep: Sequence[str] = ()) -> Source:
    """The source with `count` of its domains (0: all), see `sample_domains`."""
    if not count:
        return source
    kept = sample_domains(source.domains, count, keep)
    return _only(source, [k for k, i in enumerate(source.items) if i.domain in kept])


def keep_classes(source: Source, names: Sequence[str]) -> Source:
    """The source with these classes only; all of them where none is named."""
    known = source.classes
    for wanted in names:
        if wanted not in known:
            raise FedvlmError(f"classes={wanted}: no such class in data={source.name}; {nearest(wanted, known)}")
    if not names:
        return source
    if len(set(names)) < 2:
        raise FedvlmError(f"classes={names[0]}: a classifier needs at least two; name more, or leave classes= out")
    found = _only(source, [k for k, i in enumerate(source.items) if i.label in names])
    given = found.embeddings
    if given is None or given.text is None:
        return found
    rows = [known.index(c) for c in found.classes]
    return replace(found, embeddings=given._replace(text=given.text[rows]))


def _only(source: Source, rows: list[int]) -> Source:
    """The source with these items."""
    masks = tuple(source.masks[k] for k in rows if source.masks)
    if isinstance(source.items, NumberedItems):
        items: Sequence[Item] = source.items.only(np.array(rows, np.int64))
    else:
        items = tuple(source.items[k] for k in rows)
    given = source.embeddings
    return replace(source, items=items, masks=masks, embeddings=given and given._replace(x=given.x[rows]))


def existing(name: str, key: str, advice: str) -> Path:
    """The path of what exists under this name, or an error."""
    try:
        root = Path(name).expanduser()
        root.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FedvlmError(f"{key}={name}: no such folder; {advice}") from error
    except (OSError, RuntimeError, ValueError) as error:  # a home directory that is not known, a zero byte
        raise FedvlmError(f"{key}={name}: cannot be opened ({getattr(error, 'strerror', '') or error})") from error
    return root


def with_classes(source: Source) -> Source:
    """The source, or an error where there is nothing to tell apart."""
    if len(source.classes) < 2:
        raise FedvlmError(f"data={source.name}: only one class ({source.classes[0]}); a classifier needs at least two")
    return source


def open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except Exception as error:  # of untrusted bytes: zipfile lets struct's, Unicode's and its own errors pass
        raise FedvlmError(f"data={path}: cannot be read as a zip file ({error})") from error


def group_of(pattern: str, file: str) -> str:
    """What the pattern's first capture group matches in a file name; "" (a group by itself) where nothing matches."""
    if not pattern:
        return ""
    try:
        match = re.search(pattern, file)
        return match.group(1) if match else ""
    except (re.error, IndexError) as error:
        raise FedvlmError(
            f"group={pattern}: expected a regular expression with one capture group, such as (patient\\d+) ({error})"
        ) from error


def digest(data: bytes | memoryview) -> bytes:
    """A 16-byte content hash."""
    return hashlib.blake2b(data, digest_size=16).digest()
