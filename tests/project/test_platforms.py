"""The package runs on Linux, macOS and Windows: it uses nothing that exists on one of them only, and opens text as UTF-8."""

from __future__ import annotations

import ast
from pathlib import Path

import fedvlm

ROOT = Path(fedvlm.__file__).parent

# POSIX only, Windows only, or (select, selectors) of sockets only on Windows
MODULES = {
    "fcntl", "grp", "msvcrt", "nt", "ossaudiodev", "posix", "pty", "pwd", "resource", "select", "selectors", "spwd",
    "syslog", "termios", "tty", "winreg", "winsound", "_winapi",
}  # fmt: skip
NAMES = {
    "os": {
        "chown", "chroot", "cpu_affinity", "fchmod", "fchown", "fork", "forkpty", "geteuid", "getgid", "getloadavg",
        "getpgid", "getuid", "killpg", "lchown", "mkfifo", "mknod", "nice", "openpty", "posix_fadvise",
        "posix_fallocate", "posix_spawn", "pread", "preadv", "pwrite", "pwritev", "sched_getaffinity",
        "sched_setaffinity", "sendfile", "set_blocking", "setgid", "setpgid", "setsid", "setuid", "startfile", "statvfs",
        "sysconf", "uname", "wait", "wait3", "wait4", "waitid",
    },
    "signal": {
        "CTRL_BREAK_EVENT", "CTRL_C_EVENT", "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT",
        "SIGSTOP", "SIGTSTP", "SIGUSR1", "SIGUSR2", "alarm", "pause", "pthread_kill", "setitimer", "sigwait",
    },
    "time": {"tzset"},
    "socket": {"AF_UNIX"},
    "subprocess": {"STARTUPINFO", "CREATE_NEW_CONSOLE", "CREATE_NEW_PROCESS_GROUP", "CREATE_NO_WINDOW"},
}  # fmt: skip
PREFIXES = {"mmap": ("MADV_", "MAP_", "PROT_")}


def is_forbidden(module: str, name: str) -> bool:
    return name in NAMES.get(module, ()) or name.startswith(PREFIXES.get(module, ("\0",)))


def found_in(source: str) -> set[str]:
    """What a source file uses that other systems lack: `import fcntl`, `os.fork`, `from os import fork as f`, and the same
    under another name (`import os as system`)."""
    tree = ast.parse(source)
    known: dict[str, str] = {}  # local name → module
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                known[alias.asname or top] = top
                found |= {top} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            top = node.module.split(".")[0]
            found |= {top} & MODULES
            found |= {f"{top}.{a.name}" for a in node.names if is_forbidden(top, a.name)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            found |= {n.split(".")[0] for n in names} & MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = known.get(node.value.id, "")
            if is_forbidden(module, node.attr):
                found.add(f"{module}.{node.attr}")
    return found


def without_encoding(source: str) -> list[int]:
    """Lines that read or write text in the system's own encoding, which is not UTF-8 everywhere: read_text, write_text,
    open(…) and PATH.open(…)."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(k.arg == "encoding" for k in node.keywords):
            continue
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        modes = [k.value for k in node.keywords if k.arg == "mode"]
        modes += node.args[1:2] if function == "open" else node.args[:1] if method == "open" else []
        words = [m.value for m in modes if isinstance(m, ast.Constant) and isinstance(m.value, str)]
        is_text = any("b" not in w for w in words) if modes else bool(function or not node.args)
        if (
            (method == "read_text" and not node.args)
            or (method == "write_text" and len(node.args) < 2)
            or ("open" in (method, function) and is_text)
        ):
            lines.append(node.lineno)
    return lines


def test_every_file_of_the_package_runs_on_all_systems():
    wrong = {}
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if found := [*found_in(source), *(f"line {n}: text without encoding=" for n in without_encoding(source))]:
            wrong[path.relative_to(ROOT).as_posix()] = found
    assert wrong == {}


def test_the_check_finds_what_one_system_lacks():
    for source, expected in [
        ("import fcntl", {"fcntl"}),
        ("import os, msvcrt as m", {"msvcrt"}),
        ("def f():\n    from resource import getrusage", {"resource"}),
        ("import selectors", {"selectors"}),
        ("from select import poll", {"select"}),
        ("try:\n    import pwd\nexcept ImportError:\n    pwd = None", {"pwd"}),
        ("import importlib\nimportlib.import_module('termios')", {"termios"}),
        ("__import__('pty')", {"pty"}),
        ("import os\nos.fork()", {"os.fork"}),
        ("import os as system\nn = len(system.sched_getaffinity(0))", {"os.sched_getaffinity"}),
        ("import os\ncall = os.pwrite", {"os.pwrite"}),
        ("from os import getuid as user, path", {"os.getuid"}),
        ("import os\nos.setsid(); os.set_blocking(1, False)", {"os.setsid", "os.set_blocking"}),
        ("import signal\nsignal.SIGKILL", {"signal.SIGKILL"}),
        ("from signal import SIGUSR1, SIGTERM", {"signal.SIGUSR1"}),
        ("import mmap\nm.madvise(mmap.MADV_DONTNEED)", {"mmap.MADV_DONTNEED"}),
        ("import socket\nsocket.AF_UNIX", {"socket.AF_UNIX"}),
    ]:
        assert found_in(source) == expected, source
    for source in [
        "import os\nos.environ, os.getpid(), os.cpu_count(), os.kill, os.replace, os.dup2, os._exit",
        "import signal\nsignal.SIGTERM, signal.SIGINT",
        "import mmap\nmmap.mmap(1, 2), mmap.ACCESS_READ",
        "fork = 1\nnode.fork()",
        "from fedvlm import select\nselect.poll",
        "import os\ngetattr(os, 'sched_getaffinity', None)",
    ]:
        assert found_in(source) == set(), source


def test_the_check_finds_text_without_encoding():
    for source in [
        "p.read_text()",
        "p.write_text('x')",
        "open('x')",
        "open('x', 'w')",
        "p.open()",
        "p.open('a')",
        "p.open(mode='w')",
    ]:
        assert without_encoding(source) == [1], source
    for source in [
        "p.read_text('utf-8')",
        "p.write_text('x', 'utf-8')",
        "p.read_text(encoding='utf-8')",
        "open('x', 'rb')",
        "p.open('wb')",
        "p.open(mode, buffering=0)",
        "Image.open(p)",
        "gzip.open(p)",
        "opener.open(request, timeout=1)",
        "p.open(encoding='utf-8')",
        "open('x', 'w', encoding='utf-8')",
        "cls.open(job)",
        "engine_class().open(job)",
    ]:
        assert without_encoding(source) == [], source
