"""Webdataset shards, .tar files: the files of an example have one name, as 0001.jpg beside 0001.cls.

The class is in .cls or .txt (one line), or in .json under label; .json may also have client (or site), domain, group (or
patient) and split. `data=` is one .tar, a folder of them, or a name with a range such as shards-{000..003}.tar. Nothing is
unpacked: members are read where they lie, and links in a tar are ignored.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from fedvlm.data.format import Format, Options, folder_at, image_endings, require_decoders
from fedvlm.data.formats.folder import names_in_folder
from fedvlm.data.formats.table import checked, columns, item_of
from fedvlm.data.images import BadImage, bad_image, check_length
from fedvlm.data.source import MAX_ITEMS, Item, Source, existing
from fedvlm.errors import FedvlmError

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MAX_SHARDS = 100_000
LONGEST_HEAD = 1 << 20  # bytes of what belongs to the head of a member:
HEADS = (b"L", b"K", b"x", b"g", b"X")  # long names of GNU tar, and headers of pax
LONGEST = 1 << 16  # bytes of what describes an example
LABELS = (".cls", ".txt", ".json")


class Shards(Format):
    def recognises(self, name: str) -> bool:
        root = folder_at(name)
        return name.endswith(".tar") or bool(root and in_folder(root) and not names_in_folder(root))

    def open(self, name: str, options: Options) -> Source:
        return open_shards(name, options.group)

    def reader(self, root: Path) -> AbstractContextManager[Callable[[str], bytes]]:
        return shard_reader(root)


def in_folder(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.suffix == ".tar" and p.is_file())


def open_shards(name: str, group: str) -> Source:
    shards = shards_of(name)
    items, notes = list[Item](), dict[str, None]()
    for shard in shards:
        for item, said in examples(shard, group):
            items.append(item)
            notes |= dict.fromkeys(said)
            if len(items) > MAX_ITEMS:
                raise FedvlmError(f"data={name}: more than {MAX_ITEMS:,} examples; give fewer shards")
    if not items:
        raise FedvlmError(f"data={name}: no image with a class in it; expected NAME.jpg beside NAME.cls, .txt or .json")
    require_decoders(i.path for i in items)
    if len({bool(i.split) for i in items}) > 1 or len({bool(i.client) for i in items}) > 1:
        raise FedvlmError(
            f"data={name}: some examples have a split or a client and others none; give it for all of them"
        )
    stem = Path(RANGE.sub("", name)).name.removesuffix(".tar").strip("-_.") or "shards"
    return checked(Source(stem, shards[0].resolve().parent, tuple(items), notes=tuple(notes)))


def shards_of(name: str) -> list[Path]:
    match = RANGE.search(name)
    if match is None:
        root = existing(name, "data", "give a .tar file, or a range such as shards-{000..003}.tar")
        return in_folder(root) if root.is_dir() else [root]
    low, high = int(match[1]), int(match[2])
    if not 0 <= high - low < MAX_SHARDS:
        raise FedvlmError(f"data={name}: {{{match[1]}..{match[2]}}} is no range of at most {MAX_SHARDS:,} shards")
    numbers = [f"{k:0{len(match[1])}d}" for k in range(low, high + 1)]
    return [existing(RANGE.sub(n, name, count=1), "data", "it is in the range of shards") for n in numbers]


def examples(shard: Path, group: str) -> Iterator[tuple[Item, tuple[str, ...]]]:
    """The examples of a shard that have an image and a class, and what is said of them."""
    with opened(shard) as archive:
        files: dict[str, dict[str, tarfile.TarInfo]] = {}
        for member in members(shard, archive):
            folder, _, file = member.name.rpartition("/")
            stem, dot, ending = file.partition(".")
            if stem and member.isreg():
                files.setdefault(f"{folder}/{stem}", {})[f"{dot}{ending}".lower()] = member
        for found in files.values():
            image = next((found[e] for e in found if e in image_endings()), None)
            about = next((found[e] for e in LABELS if e in found), None)
            if image is None or about is None:
                continue
            row, notes = facts(f"data={shard}: {about.name}", archive, about)
            yield item_of(row, f"{shard.name}/{image.name}", group, f"data={shard.name}: {about.name}"), notes


def facts(what: str, archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[dict[str, str], tuple[str, ...]]:
    """What a file says of its example, by the names of a manifest's columns."""
    if member.size > LONGEST:
        raise FedvlmError(f"{what} has {member.size:,} bytes, more than {LONGEST:,} for a class")
    try:
        text = read(archive, member).decode().strip()
        given = json.loads(text) if member.name.lower().endswith(".json") else {"label": text}
    except (ValueError, RecursionError) as error:  # BadImage is a ValueError
        raise FedvlmError(f"{what} cannot be read ({error})") from None
    if not isinstance(given, dict):
        raise FedvlmError(f"{what} is no JSON object with a label")
    fields, notes = columns(list(given), ("label",), what)
    row = {name: str(given[key]).strip() for name, key in fields.items()}
    if not row["label"] or "\n" in row["label"]:
        raise FedvlmError(f"{what} is empty or has several lines; a class has one")
    return row, notes


class Header(tarfile.TarInfo):
    """A member's head; what belongs to it, such as a long name, is read into memory and so has a limit."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.size > LONGEST_HEAD and self.type in HEADS:
            raise tarfile.ReadError(f"a head of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]


@contextmanager
def opened(shard: Path) -> Iterator[tarfile.TarFile]:
    try:
        archive = tarfile.open(shard, "r:", tarinfo=Header)  # noqa: SIM115  (closed below; an error of the caller's is not one of opening)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FedvlmError(f"data={shard}: cannot be read as a .tar file without compression ({error})") from None
    with archive:
        yield archive


def members(shard: Path, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    try:
        yield from archive
    except Exception as error:  # of untrusted bytes: tarfile lets ValueErrors and its own pass
        raise FedvlmError(f"data={shard}: cannot be read to its end ({error}); make it anew") from None


def read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    with bad_image("cannot be read from the tar"):
        check_length(member.size)
        file = archive.extractfile(member)
        data = file.read() if file else b""
        if len(data) < member.size:
            raise BadImage("cannot be read from the tar: cut off")
        return data


@contextmanager
def shard_reader(root: Path) -> Iterator[Callable[[str], bytes]]:
    """Reads `SHARD/member`; one shard is open at a time."""
    current: list[tuple[str, tarfile.TarFile, dict[str, tarfile.TarInfo]]] = []

    def member(path: str) -> bytes:
        shard, _, name = path.partition("/")
        if not current or current[0][0] != shard:
            if current:
                current.pop()[1].close()
            with bad_image("cannot be read from the tar"):
                archive = tarfile.open(root / shard, "r:")  # noqa: SIM115
                current.append((shard, archive, {m.name: m for m in archive if m.isreg()}))
        _, archive, known = current[0]
        if name not in known:
            raise BadImage("cannot be read from the tar: no longer there")
        return read(archive, known[name])

    try:
        yield member
    finally:
        if current:
            current[0][1].close()
