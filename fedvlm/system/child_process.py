"""Child processes of this one: each has a pipe of its own, ends with its parent, and never sees Ctrl-C."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from fedvlm.system.interrupts import held


class Child:
    """A child and a pipe to it alone: with a queue that all share, one killed while it sends could block the others."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        """Runs target(pipe, *args) there; it is to call `obey` first."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args))
        with _main_hidden(), held():  # Ctrl-C while it imports torch would print a traceback
            self.process.start()
        theirs.close()  # the child alone holds it now, so the pipe ends when the child does

    def give(self, what: object) -> None:
        with contextlib.suppress(OSError):  # it is dead already: reading from it says so
            self.pipe.send(what)

    def end(self) -> str:
        """Ends it, where it is not dead already; how it ended, in words."""
        self.pipe.close()
        self.process.kill()
        self.process.join()
        code = self.process.exitcode or 0
        return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Children do not run the user's script again: without this, a script that calls `fedvlm.bench` would need a
    `if __name__ == "__main__"` guard."""
    script = vars(sys.modules["__main__"])
    hidden: dict[str, object] = {n: script.pop(n) for n in ("__file__", "__spec__") if n in script}
    script["__spec__"] = None
    try:
        yield
    finally:
        script.update(hidden)


def obey() -> None:
    """Ignore Ctrl-C in a child, since it reaches all processes and is the parent's to act on, and end with the
    parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
