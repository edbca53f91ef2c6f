"""Make Ctrl-C stop a command reliably, whatever code it interrupts."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C raise KeyboardInterrupt; the function that is yielded raises it once more, and any other error that
    follows becomes it.

    A KeyboardInterrupt can get lost in a destructor, or become another error while a library is imported. Shells start
    background jobs of scripts with the signal ignored; here it counts for these, too."""
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # not in the main thread, where signals do not arrive
        yield check
        return
    try:
        yield check
        check()
    except Exception:
        check()
        raise
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold Ctrl-C back until the end, and hide it from processes that are started: whoever started them ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shell_line(words: Sequence[str]) -> str:
    """These words as a command line."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def key_words(given: Mapping[str, object]) -> list[str]:
    """These keys as a command line takes them: key=value, several values with commas between."""
    return [f"{k}={','.join(map(str, v)) if isinstance(v, list | tuple) else v}" for k, v in given.items()]
