"""`fedvlm serve` and `fedvlm join`: NVFlare's process of a kit, started again when it dies, ended with this one.

`python -m fedvlm.federation.start KIND FOLDER NAME PARENT` is that process. It ends when its parent is gone, and the
processes of jobs, which NVFlare starts, end when it is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any, cast

from filelock import FileLock, Timeout

from fedvlm.errors import FedvlmError
from fedvlm.federation.health import Health, answering, look
from fedvlm.federation.provision import ORGANISATION, Kind, nvflare, open_kit, write_json, write_settings
from fedvlm.federation.settings import LARGEST_LOG, OVERVIEW, SERVER_HOME, About
from fedvlm.system import console, files
from fedvlm.system.machine import data_home

# variables that the processes of jobs inherit
SITE_HOME, SERVER_BACKBONE = "FEDVLM_SITE", "FEDVLM_BACKBONE"
ABOUT_SITE = "site.json"  # in a site's home
LOG, CONSOLE = "log.txt", "console.txt"  # NVFlare's log, and what it prints beside it (the reason why it cannot start)
STARTS, WITHIN = 5, 300.0  # so many starts in so many seconds, and it is given up
PAUSE = 2.0  # seconds before it is started again
GRACE = 10.0  # seconds that the processes of jobs have to end
TICK = 0.5
MODULE = "fedvlm.federation.start"
# Log lines shown to the user, with their wording
TOLD: dict[Kind, list[tuple[re.Pattern[str], str]]] = {
    "server": [
        (re.compile(r"Server started"), "listening at {host}:{port}; Ctrl-C ends it"),
        (re.compile(r"Client: New client (?P<who>[\w-]+)@\S+ joined"), "{who} has joined"),
        (re.compile(r" - INFO - .*keeper: (?P<what>.*)"), "{what}"),
    ],
    "site": [
        (
            re.compile(r"Successfully registered client"),
            "{name} has joined {federation} at {host}:{port}; Ctrl-C ends it",
        ),
    ],
}


def serve_federation(kit: str, home: str = "", backbone: str = "", health: str = "") -> None:
    """Runs a federation's server until it is stopped. `backbone`: the server's own copy; without, the one of each run.
    `health`: [HOST:]PORT for `/health` and `/metrics`."""
    folder, about = open_kit(kit, "server")
    place = home_of(about, home)
    given = {SERVER_HOME: str(place)} | ({SERVER_BACKBONE: own_backbone(backbone)} if backbone else {})
    files.private_folder(place / "runs")
    free_port(about)
    console.line(f"server of {about.federation}: runs go to {place / 'runs'}, NVFlare's log to {folder / LOG}")
    Party(folder, about, given, health).run(console.line)


def join(
    kit: str, data: str, backbone: str, rules: str = "", home: str = "", health: str = "", check: bool = False
) -> None:
    """Runs a site until it is stopped. That the data can be read and the backbone loaded is checked before. `check`: only
    says what could leave."""
    folder, about = open_kit(kit, "site")
    if check:
        from fedvlm.federation.rules import Rules, sentences

        for sentence in sentences(Rules.read(str(Path(rules).expanduser().resolve()) if rules else "")):
            console.line(sentence)
        return
    place = home_of(about, home)
    with ProcessPoolExecutor(
        1, get_context("spawn")
    ) as own:  # torch goes with that process: a site that waits is small
        content = own.submit(checked_site, about, data, backbone, rules).result()
    with alone(folder):  # a site that runs keeps its own
        write_json(place / ABOUT_SITE, content)
    console.line(f"{about.name}: its state and its ledger are in {place}, NVFlare's log is {folder / LOG}")
    if not reachable(about):
        console.line(f"{about.host}:{about.port} does not answer; {about.name} joins as soon as it does")
    Party(folder, about, {SITE_HOME: str(place)}, health).run(console.line)


def checked_site(about: About, data: str, backbone: str, rules: str) -> dict[str, str]:
    """The content of site.json, with absolute paths."""
    from fedvlm.data.format import absolute
    from fedvlm.data.source import open_source
    from fedvlm.federation.rules import Rules

    own = str(Path(rules).expanduser().resolve()) if rules else ""
    Rules.read(own)
    source = open_source(data)
    backbone = own_backbone(backbone)
    console.line(f"data={data}: {len(source.items):,} examples of {len(source.classes)} classes")
    place = {"site": about.name, "federation": about.federation, "data": absolute(data)}
    return {**place, "backbone": backbone, "rules": own}


def own_backbone(name: str) -> str:
    """A backbone that this party gave itself, and that can be loaded; of one in files, with its absolute path."""
    from fedvlm import backbones
    from fedvlm.config import trust

    trust.remember_backbone(name)
    backbones.load(name)
    if backbones.form_of(name) in ("folder", "onnx"):
        prefix = "onnx:" if name.startswith("onnx:") else ""
        return prefix + str(Path(name.removeprefix(prefix)).expanduser().resolve())
    return name


def home_of(about: About, given: str) -> Path:
    """The folder in which this party keeps what outlives a kit; nobody else may enter it."""
    place = Path(given).expanduser() if given else data_home() / about.federation / about.name
    with files.writing(place, "choose another home="):
        files.private_folder(place)
    return place.resolve()


def free_port(about: About) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", about.port))
        except OSError as error:
            raise FedvlmError(
                f"port {about.port} cannot be listened on ({error.strerror}); end what uses it, or make kits with port="
            ) from error


def reachable(about: About) -> bool:
    try:
        socket.create_connection((about.host, about.port), timeout=3).close()
    except OSError:
        return False
    return True


class Party:
    """NVFlare's process of a server or a site, and those that it starts for jobs."""

    def __init__(self, folder: Path, about: About, environment: dict[str, str], health: str = ""):
        nvflare("apis")  # an error says what is missing before anything is started
        for path in (str(folder), sys.executable):
            if shlex.split(path) != [path]:
                raise FedvlmError(
                    f"NVFlare cannot start jobs from {path}: it takes no spaces, quotes or backslashes; move it (on "
                    "Windows, use WSL)"
                )
        self.folder, self.about, self.environment, self.health = folder, about, environment, health
        self.restarts, self.told = 0, set[str]()
        self.process: subprocess.Popen[bytes] | None = None
        self.read = 0  # bytes of the log

    def run(self, say: Callable[[str], None]) -> None:
        """Supervise the processes until Ctrl-C or a signal to end."""
        with alone(self.folder), answering(self.health, self.look), signals() as stopping:
            starts: deque[float] = deque(maxlen=STARTS)
            try:
                while not stopping.is_set():
                    starts.append(time.monotonic())
                    self.start()
                    while self.alive and not stopping.wait(TICK):
                        self.tell(say)
                        self.warn(say)
                    if stopping.is_set():
                        break
                    self.tell(say)
                    if len(starts) == STARTS and time.monotonic() - starts[0] < WITHIN:
                        raise FedvlmError(
                            f"NVFlare ended {STARTS} times within {WITHIN:.0f} seconds; the reason is at the end of "
                            f"{self.folder / LOG} or {self.folder / CONSOLE}"
                        )
                    say("NVFlare's process ended by itself; it is started again")
                    self.restarts += 1
                    self.stop()
                    stopping.wait(PAUSE)
            finally:
                self.stop()
            say(f"{self.about.name} is stopped")

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        end(self.processes())  # of an earlier start that was killed
        write_settings(self.folder, self.about, self.folder)
        for grown in (self.folder / "audit.log", self.home / "agent.log"):  # NVFlare and agents only append to them
            if grown.exists() and grown.stat().st_size > LARGEST_LOG:
                grown.replace(grown.with_suffix(".old"))
        if self.about.kind == "server":
            files.write(self.home / OVERVIEW, "{}", private=True)  # what the keeper wrote before is of another process
        log = self.folder / LOG
        self.read = log.stat().st_size if log.exists() else 0
        call = [sys.executable, "-m", MODULE, self.about.kind, str(self.folder), self.about.name, str(os.getpid())]
        paths = os.pathsep.join(p for p in sys.path if p)
        # secure logging: of an exception, NVFlare's messages name the type and not the text. One heap (glibc): otherwise
        # each of NVFlare's threads keeps the memory of the largest messages that it passed on
        more = {"NVFLARE_SECURE_LOGGING": "true", "MALLOC_ARENA_MAX": "1"}
        more |= {"PYTHONPATH": paths, **self.environment}
        with files.writing(self.folder), files.opened(self.folder / CONSOLE, "wb", private=True) as out:
            self.process = subprocess.Popen(
                call,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | more,
                cwd=self.folder,
                start_new_session=os.name == "posix",  # Ctrl-C reaches this process alone, which ends the others
            )

    def tell(self, say: Callable[[str], None]) -> None:
        """What the log says since the last time, in plain words."""
        for line in self.new_lines():
            for pattern, words in TOLD[cast(Kind, self.about.kind)]:
                if match := pattern.search(line):
                    say(words.format(**asdict(self.about), **match.groupdict()))

    def look(self) -> Health:
        return look(self.about, self.home, self.alive, self.restarts)

    @property
    def home(self) -> Path:
        return Path(self.environment.get(SITE_HOME) or self.environment.get(SERVER_HOME) or self.folder)

    def warn(self, say: Callable[[str], None]) -> None:
        """Says what is wrong, once; an error where the certificate ended, since no new start would help."""
        found = look(self.about, self.home, True, self.restarts)
        if found.certificate_days <= 0:
            raise FedvlmError(f"{self.about.name}: {found.faults[0]}")
        now = {*found.faults, *found.warnings}
        for text in sorted(now - self.told):
            say(text)
        self.told = now

    def new_lines(self) -> list[str]:
        try:
            with (self.folder / LOG).open("rb") as log:
                self.read = 0 if os.fstat(log.fileno()).st_size < self.read else self.read  # a new file was begun
                log.seek(self.read)
                whole, _, _ = log.read().rpartition(b"\n")
        except OSError:
            return []
        self.read += len(whole) + bool(whole)
        return whole.decode(errors="replace").splitlines()

    def stop(self) -> None:
        """Ends all of it. The processes of jobs end by themselves when their parent is gone; who does not is killed."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            for _ in range(3):  # one that is about to end may start another
                end(self.processes(), GRACE)

    def processes(self) -> list[Any]:
        homes = [self.environment[k] for k in (SITE_HOME, SERVER_HOME) if k in self.environment]
        return processes_of(str(self.folder), *homes)


def processes_of(*places: str) -> list[Any]:
    """NVFlare's and our processes of a kit, as psutil sees them: they name its folder, or the home of its site."""
    import psutil  # comes with NVFlare

    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_ours = any(w == MODULE or w.startswith(("nvflare.private.", "fedvlm.federation.")) for w in words)
        if is_ours and process.pid != os.getpid() and not set(places).isdisjoint(words):
            found.append(process)
    return found


def end(processes: list[Any], grace: float = 0.0) -> None:
    """Waits for these processes to end, and kills those that do not."""
    import psutil

    def alive() -> list[Any]:
        found = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    deadline = time.monotonic() + grace
    while alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in alive():
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + GRACE
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process per kit."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FedvlmError(f"{folder}: another process runs this kit; end it first") from None
    except OSError as error:
        raise FedvlmError(f"{folder} cannot be written ({error.strerror}); move the kit to another place") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C, the end of the terminal and SIGTERM set. Nothing is interrupted: a second Ctrl-C cannot leave
    processes behind."""
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    names = [n for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]  # Windows has no SIGHUP
    before = {n: signal.signal(getattr(signal, n), stop) for n in names}
    try:
        yield stopping
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def end_with(parent: int) -> None:
    """Ends this process when its parent is gone. Its number is given: it may be gone before this process can ask for it."""
    import psutil

    while os.getppid() == parent and psutil.pid_exists(parent):  # the first on POSIX, the second on Windows
        time.sleep(TICK)
    os._exit(1)


def nvflare_process(kind: str, folder: str, name: str, parent: str) -> None:
    threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    os.umask(0o077)  # logs and jobs are for this user alone
    role = "client" if kind == "site" else kind
    sys.argv = [role, "-m", folder, "-s", f"fed_{role}.json", "--set", "secure_train=true", f"org={ORGANISATION}"]
    sys.argv += ["config_folder=config"] + ([f"uid={name}"] if kind == "site" else [])
    runpy.run_module(f"nvflare.private.fed.app.{role}.{role}_train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    nvflare_process(*sys.argv[1:])
