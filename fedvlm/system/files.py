"""Writing files: a file is replaced as a whole or not at all, and a place that cannot be written is one sentence."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from fedvlm.errors import FedvlmError

ADVICE = "make room there, or choose another place"
DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
Stamp = tuple[int, int, int]  # of a file, another one once it was replaced or written to
PART = ".part"  # how the name of a file ends while it is written; one that a crash left behind is never read


def write(path: Path, data: bytes | str, *, private: bool = False, sync: bool = False, advice: str = ADVICE) -> None:
    """The whole file or, where that fails, the one that was there before. Folders on the way are made.

    private: nobody but this user may read it. sync: from the return on it survives a power cut.
    """
    with writing(path, advice):
        content = data.encode(errors="backslashreplace") if isinstance(data, str) else data  # names may be no Unicode
        is_stream = path.parent in DEVICES or (path.exists() and not path.is_file())
        if is_stream:  # or a folder, which the system refuses
            with path.open("ab") as out:  # /dev/stdout may be a file that others write, too
                out.write(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path, private, sync) as out:
            out.write(content)


def stamp(path: Path) -> Stamp:
    about = path.stat()
    return about.st_mtime_ns, about.st_ino, about.st_size


@contextlib.contextmanager
def replaced(path: Path, private: bool = False, sync: bool = False) -> Iterator[BinaryIO]:
    """A file to write, beside `path`, that takes its place when all is written."""
    path = path.resolve()  # of a link, the file that it stands for
    part = path.with_name(f"{uuid.uuid4().hex}{PART}")
    try:
        with opened(part, "xb", private) as out:
            yield out
            if sync:
                out.flush()
                os.fsync(out.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


@contextlib.contextmanager
def writing(path: Path | str, advice: str = ADVICE) -> Iterator[None]:
    """Turn what the system refuses to write there into an error of one sentence."""
    try:
        yield
    except BrokenPipeError:  # of the output; whoever reads it has seen enough
        raise
    except OSError as error:
        raise FedvlmError(f"{path} cannot be written ({error.strerror or error}); {advice}") from error


def opened(path: Path, mode: str, private: bool = False, buffering: int = -1) -> BinaryIO:
    """Open a file like `open`, for bytes; a new file is readable by others only if it is not private."""
    opener = partial(os.open, mode=0o600 if private else 0o666)
    return cast(BinaryIO, open(path, mode, buffering, opener=opener))


def private_folder(path: Path) -> None:
    """A folder that nobody but this user may enter (on Windows: with the rights of the folder around it)."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)


def shared_cache() -> bool:
    """Whether the user lets others of this machine read the cache, which holds features and decoded images."""
    return os.environ.get("FEDVLM_CACHE_SHARED", "") == "1"


def cache_folder(path: Path) -> None:
    """A folder of the cache, which nobody else may enter unless it is shared."""
    path.mkdir(parents=True, exist_ok=True)
    if not shared_cache():
        with contextlib.suppress(OSError):  # another user's, which may be used as it is
            path.chmod(0o700)


def sync(path: Path) -> None:
    """Waits until what was written there is on the disk."""
    with path.open("r+b") as file:  # Windows asks for the right to write
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes renames in this folder survive a power cut, where the system can."""
    with contextlib.suppress(OSError):  # Windows does not open folders, and does not need it
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
