"""Users' own code: a part given as a file or as package.module, copied into runs and exports, and imported from there.

The copy holds the file and the modules beside it that it imports, or the whole package (.py files only). It is imported
from its own folder even where another version of it is already loaded.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from fedvlm.errors import FedvlmError
from fedvlm.system.machine import cache_home

LIMIT = 4 << 20  # bytes of a package's source; more is not a part but a library
_loaded: dict[tuple[str, str], ModuleType] = {}


class Home(NamedTuple):
    """Whose code lies in a file or folder."""

    part: str  # such as adapter=shift.py
    origin: Path  # the same in the user's own files, which errors name


homes: dict[Path, Home] = {}  # of the code that was imported in this process


class Code(NamedTuple):
    """Source files by relative path, and which of them to import."""

    files: dict[str, str]
    entry: str
    origin: str = ""  # the folder that they were read from

    @property
    def digest(self) -> str:
        """Names the code in records, identities and the cache."""
        return hashlib.blake2b(self._content, digest_size=8).hexdigest()

    @property
    def seal(self) -> str:
        """SHA-256 of the code; trust is stored under it."""
        return hashlib.sha256(self._content).hexdigest()

    @property
    def _content(self) -> bytes:
        return repr(sorted((name, text.encode()) for name, text in self.files.items())).encode()

    def write(self, folder: Path) -> None:
        """Into a folder that holds no other code: whoever reads it there must find this and nothing else."""
        for other in sorted(folder.rglob("*.py")):
            if other.relative_to(folder).as_posix() not in self.files:
                raise FedvlmError(f"{folder} holds other code ({other.name}); remove it, or choose another folder")
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())

    def load(self, what: str) -> ModuleType:
        """Imports it from a copy in the cache, so that later edits of the original do not matter; once per process."""
        if self.entry not in self.files:
            raise FedvlmError(f"{what}: its code is missing; it should hold {self.entry}")
        key = (self.seal, self.entry)
        if key not in _loaded:
            tops, folder = {name.split("/")[0].removesuffix(".py") for name in self.files}, self._cached()
            homes[folder] = Home(what, Path(self.origin))
            _loaded[key] = _import(what, folder, self.entry, self.digest, tops)
        return _loaded[key]

    def _cached(self) -> Path:
        """A folder with this code: in the cache, written beside and renamed, since other processes may read it."""
        folder = (cache_home() / "code" / self.digest).resolve()
        if folder.is_dir() and stored_code(folder, self.entry).files == self.files:
            return folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(dir=folder.parent))
            self.write(fresh)
        except OSError:  # a read-only or full cache
            fresh = Path(tempfile.mkdtemp(prefix="fedvlm-code-")).resolve()
            self.write(fresh)
        with contextlib.suppress(OSError):  # another process was first: either copy will do
            return fresh.rename(folder)
        return fresh


def stored_code(folder: Path, entry: str, origin: str = "") -> Code:
    """The code that `write` put into a folder; `origin`: the folder that it was read from, where that is known."""
    files = {p.relative_to(folder).as_posix(): _text(p) for p in sorted(folder.rglob("*.py"))}
    return Code(files, entry, origin or str(folder))


def remember(part: str, module: ModuleType) -> None:
    """Errors in this module, or in its package, are those of a part that an installed package declares."""
    top = sys.modules[module.__name__.partition(".")[0]]
    file = Path(top.__file__ or "")
    home = file.parent if hasattr(top, "__path__") else file
    homes[home] = Home(part, home)


def home_of(file: str) -> tuple[str, str]:
    """The part that a file of an imported module is of, and the user's own file that it is a copy of; "" where it is not
    the code of a part."""
    path = Path(file)
    for place in (path, *path.parents):
        if place in homes:
            return homes[place].part, str(homes[place].origin / path.relative_to(place))
    return "", ""


def is_own(spec: str) -> bool:
    """Whether a part's name is a file or a module rather than a built-in name."""
    return spec.endswith(".py") or "." in spec


def read_code(what: str, spec: str) -> Code:
    """The code behind `path/to/file.py` or `package.module`; `what` names it in errors, such as adapter=shift.py."""
    if spec.endswith(".py"):
        path = Path(spec).expanduser()
        if not path.is_file():
            raise FedvlmError(f"{what}: no such file")
        return Code(with_siblings(path), path.name, str(path.parent))
    try:
        found = importlib.util.find_spec(spec)
    except (ImportError, ValueError, AttributeError) as error:
        raise FedvlmError(f"{what}: no such module ({error}); is its package installed?") from error
    if found is None or not found.origin or not found.origin.endswith(".py"):
        raise FedvlmError(f"{what}: no such module, or it has no Python source")
    path, names = Path(found.origin), spec.split(".")
    if len(names) == 1 and path.name != "__init__.py":
        return Code(with_siblings(path), path.name, str(path.parent))
    root = path.parents[len(names) - (path.name != "__init__.py") - 1]  # the folder of the top-level package
    files = {f"{names[0]}/{p.relative_to(root).as_posix()}": _text(p) for p in sorted(root.rglob("*.py"))}
    if sum(map(len, files.values())) > LIMIT:
        raise FedvlmError(
            f"{what}: package {names[0]} holds over {LIMIT >> 20} MB of code; move the part to a file of its own"
        )
    return Code(files, f"{names[0]}/{path.relative_to(root).as_posix()}", str(root.parent))


def with_siblings(path: Path) -> dict[str, str]:
    """The file, and the modules in the same folder that it imports, and those that they import."""
    files: dict[str, str] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(path.parent).as_posix()
        if name in files:
            continue
        files[name] = _text(file)
        for module in _imports(files[name]):
            top = path.parent / module
            waiting += [top.with_suffix(".py")] if top.with_suffix(".py").is_file() else []
            waiting += sorted(top.rglob("*.py")) if (top / "__init__.py").is_file() else []
    return files


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LIMIT:
            raise FedvlmError(f"{path} is larger than {LIMIT >> 20} MB, too large for the code of a part")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FedvlmError(f"{path} cannot be read as Python source ({error})") from error


def _imports(source: str) -> set[str]:
    """Top-level names that a source file imports."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()  # importing it will say so
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names)


def _import(what: str, folder: Path, entry: str, mark: str, names: set[str]) -> ModuleType:
    tops = names - set(sys.stdlib_module_names)

    def ours() -> dict[str, ModuleType]:
        return {n: m for n, m in sys.modules.items() if n.split(".")[0] in tops}

    hidden = ours()
    for name in hidden:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        if "/" in entry:
            return importlib.import_module(entry.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        return _from_file(folder / entry, f"fedvlm_own_{mark}.{Path(entry).stem}")
    except FedvlmError:
        raise
    except Exception as error:
        at = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        at, fault = (
            ([(error.filename or "", error.lineno)], error.msg) if isinstance(error, SyntaxError) else (at, error)
        )
        own = [f" ({home_of(file)[1]}:{line})" for file, line in at if home_of(file)[0]]
        where = "".join(own[-1:])
        raise FedvlmError(f"{what} does not import: {type(error).__name__}: {fault}{where}") from error
    finally:
        sys.path.remove(str(folder))
        for name in ours():
            del sys.modules[name]
        sys.modules.update(hidden)


def _from_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
