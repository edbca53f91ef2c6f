"""Is this machine fit to run fedvlm? Each check names what is wrong and what to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedvlm.data.store import home
from fedvlm.runs import default_out


class Finding(NamedTuple):
    state: str  # ok, note, broken
    what: str
    fix: str = ""


def examine() -> Iterator[Finding]:
    yield _python()
    yield from _torch()
    yield _torchvision()
    yield from _space()
    yield _threads()
    yield from _extras()
    yield _backbone()


def _python() -> Finding:
    return Finding("ok", "Python " + ".".join(map(str, sys.version_info[:3])))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Iterator[Finding]:
    for package in ("torch", "transformers", "safetensors"):
        try:
            importlib.import_module(package)
            yield Finding("ok", f"{package} {_version(package)}")
        except Exception as error:
            fix = f'pip install -c constraints-cpu.txt "fedvlm" (or `pip install {package}`)'
            yield Finding("broken", f"{package} does not import: {type(error).__name__}: {error}", fix)


def _torchvision() -> Finding:
    """A torchvision built for another torch breaks transformers' imports too, with a message about `nms`."""
    version = _version("torchvision")
    if version is None:
        return Finding("ok", "torchvision absent (fedvlm does not need it)")
    try:
        importlib.import_module("torchvision")
        return Finding("ok", f"torchvision {version} beside torch {_version('torch')}")
    except Exception as error:
        what = f"torchvision {version} does not fit torch {_version('torch')} ({type(error).__name__}: {error})"
        return Finding("broken", what, "pip uninstall torchvision (fedvlm does not need it)")


def _space() -> Iterator[Finding]:
    for name, folder in (("feature store", home()), ("runs", default_out())):
        there = folder.absolute()
        while not there.exists():
            there = there.parent
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield Finding(
                "broken", f"{name} at {folder} cannot be written", "set FEDVLM_CACHE / FEDVLM_RUNS to a folder of yours"
            )
        elif free < 1 << 30:
            yield Finding(
                "broken", f"{name}: {free / 1e9:.1f} GB free at {folder}", "make room, or `fedvlm cache --prune`"
            )
        else:
            yield Finding("ok", f"{name} at {folder}: {free / 1e9:.0f} GB free")


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0))
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit and limit.isdigit() and int(limit) < cores:
        return Finding("note", f"OMP_NUM_THREADS={limit} of {cores} cores", "unset it: encoding images uses all cores")
    if cores < 2:
        return Finding("note", "one core", "everything works; encoding images takes longer")
    return Finding("ok", f"{cores} cores")


def _extras() -> Iterator[Finding]:
    for extra, package in (("report", "jinja2"), ("onnx", "onnxruntime")):
        if _version(package):
            yield Finding("ok", f"extra {extra} ({package} {_version(package)})")
        else:
            yield Finding("note", f"extra {extra} is not installed", f'pip install "fedvlm[{extra}]" if you want it')


def _backbone() -> Finding:
    from fedvlm import backbones

    try:
        model = backbones.load("mini-clip")
        found = model.texts(["a photo of a dog"])
        assert found is not None and bool(found.isfinite().all())
        return Finding("ok", f"mini-clip loads and encodes ({model.dim} dimensions)")
    except Exception as error:
        asset = Path("fedvlm/backbones/assets/mini-clip")
        return Finding(
            "broken", f"mini-clip does not load: {type(error).__name__}: {error}", f"install fedvlm again ({asset})"
        )
