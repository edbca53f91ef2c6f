"""What a format of data is, and which one a name is in: the files of `formats` and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from fedvlm.errors import FedvlmError
from fedvlm.parts import registry

if TYPE_CHECKING:
    from PIL.Image import Image

    from fedvlm.data.source import Source

FOLDER = "folder"  # what no other format recognises
# files of images that every format may hold
IMAGES = frozenset([".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"])


class Options(NamedTuple):
    """What the user asked for beside data=."""

    group: str = ""  # a regular expression for file names, see `group_of`
    domains: int = 0  # text: how many are kept; 0: all
    stride: int = 8  # text: characters from one example to the next
    keep: Sequence[str] = ()  # domains that are kept in any case
    columns: Sequence[str] = ()  # of a table: NAME:COLUMN


class Format:
    """A format of data: a list of examples and how their bytes are read, or a kind of image file that other formats hold.

    data=NAME is in the first format that recognises it, those of installed packages before ours; data=FORMAT:NAME is in
    that one."""

    in_threads: ClassVar[bool] = False  # whether several threads may call what `reader` gives
    endings: ClassVar[tuple[str, ...]] = ()  # of the image files that `picture` decodes, such as .dcm

    def recognises(self, name: str) -> bool:
        """Whether data=NAME is in this format, as its ending or what lies in a folder says."""
        return False

    def open(self, name: str, options: Options) -> Source:
        """The list of examples; an error says what is wrong with the data."""
        raise NotImplementedError

    def reader(self, root: Path) -> AbstractContextManager[Callable[[str], bytes]]:
        """The function from an item's path to its bytes; it raises `BadImage` where they cannot be read."""
        from fedvlm.data.source import file_reader

        return file_reader(root)

    def picture(self, data: bytes, most_pixels: int) -> Image | None:
        """The picture in a file of this kind, a ValueError with the reason where it cannot be decoded or has more pixels;
        None for a file of another kind."""
        return None

    def lacks(self) -> str:
        """What must be installed before `picture` works; "" where nothing is missing."""
        return ""


@cache
def known() -> dict[str, Format]:
    """All formats by name, in the order in which they are asked."""
    ours = registry.built_in("format")
    names = sorted(registry.names("format"), key=lambda name: (name == FOLDER, name in ours, name))
    return {name: registry.find("format", name)() for name in names}


def named(data: str) -> tuple[str, str]:
    """The format and the name in data=FORMAT:NAME; of other data the format is the one that recognises them."""
    kind, _, name = data.partition(":")
    if name and kind in known():
        return kind, name
    return next(kind for kind, one in known().items() if one.recognises(data)), data


def absolute(data: str) -> str:
    """The same data from every working directory."""
    name = named(data)[1]
    return data if data == "emoji" else data.removesuffix(name) + str(Path(name).expanduser().resolve())


def folder_at(name: str) -> Path | None:
    """The folder of this name, where there is one that can be looked into."""
    with suppress(OSError, RuntimeError, ValueError):
        root = Path(name).expanduser()
        return root if root.is_dir() else None
    return None


@cache
def decoders() -> dict[str, Format]:
    """The formats of image files that Pillow alone does not read."""
    return {name: one for name, one in known().items() if one.endings}


@cache
def image_endings() -> frozenset[str]:
    return IMAGES.union(*(one.endings for one in decoders().values()))


def require_decoders(names: Iterable[str]) -> None:
    """An error where there are images that nothing here can decode."""
    lacking = {ending: (kind, one.lacks()) for kind, one in decoders().items() for ending in one.endings if one.lacks()}
    for name in names if lacking else ():
        kind, missing = lacking.get(Path(name).suffix.lower(), ("", ""))
        if missing:
            raise FedvlmError(f"{name} is a {kind.upper()} file, which needs a further package: {missing}")
