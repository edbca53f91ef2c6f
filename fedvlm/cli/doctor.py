"""`fedvlm doctor`: checks of the installation and the machine, each with what is wrong and how to fix it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

from fedvlm.system.machine import cache_home, cores, runs_home

EXTRAS = (
    ("report", "jinja2"),
    ("onnx", "onnxruntime"),
    ("dp", "dp-accounting"),
    ("secure", "cryptography"),
    ("nvflare", "nvflare"),
    ("transformers", "transformers"),
    ("tracking", "tensorboard"),
)  # and a package of each
MINIMUM_SPACE = 1 << 30  # bytes


class Finding(NamedTuple):
    state: Literal["ok", "note", "broken"]
    what: str
    fix: str = ""  # what to do; "" where nothing is needed


def examine() -> Iterator[Finding]:
    yield _python()
    yield from _packages()
    yield _torchvision()
    yield from _folders()
    yield _threads()
    yield from _extras()
    yield _backbone()
    yield _same_bits()


def _python() -> Finding:
    return Finding("ok", "Python " + ".".join(map(str, sys.version_info[:3])))


def _version(package: str) -> str | None:
    """The installed version; None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    for package in ("torch", "tokenizers", "safetensors"):
        try:
            importlib.import_module(package)
            yield Finding("ok", f"{package} {_version(package)}")
        except Exception as error:
            fix = f'pip install -c constraints-cpu.txt "fedvlm" (or `pip install {package}`)'
            yield Finding("broken", f"{package} does not import: {type(error).__name__}: {error}", fix)


def _torchvision() -> Finding:
    """A torchvision built for another version of torch makes transformers fail on import, with a message about `nms`."""
    from fedvlm.backbones.model_folder import mixed_install

    if what := mixed_install():
        return Finding("broken", what, "pip uninstall torchvision (fedvlm does not need it)")
    version = _version("torchvision")
    known = f"torchvision {version} with torch {_version('torch')}" if version else "torchvision is not installed"
    return Finding("ok", f"{known} (fedvlm does not need it)")


def _folders() -> Iterator[Finding]:
    for name, folder in (("feature store", cache_home()), ("runs", runs_home())):
        try:
            existing = folder.absolute()
            while not existing.exists():
                existing = existing.parent
            free = shutil.disk_usage(existing).free
            writable = existing.is_dir() and os.access(existing, os.W_OK)
        except OSError:  # a name that is too long
            writable, free = False, 0
        if not writable:
            fix = "set FEDVLM_CACHE / FEDVLM_RUNS to a folder that you may write to"
            yield Finding("broken", f"{name} at {folder} cannot be written", fix)
        elif free < MINIMUM_SPACE:
            fix = "free some space, or `fedvlm cache --prune`"
            yield Finding("broken", f"{name}: {free / 1e9:.1f} GB free at {folder}", fix)
        else:
            yield Finding("ok", f"{name} at {folder}: {free / 1e9:.0f} GB free")


def _threads() -> Finding:
    count = cores()
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit and limit.isdigit() and int(limit) < count:
        return Finding("note", f"OMP_NUM_THREADS={limit} of {count} cores", "unset it: encoding images uses all cores")
    if count < 2:
        return Finding("note", "one core", "everything works; encoding images takes longer")
    return Finding("ok", f"{count} cores")


def _extras() -> Iterator[Finding]:
    for extra, package in EXTRAS:
        if _version(package):
            yield Finding("ok", f"extra {extra} ({package} {_version(package)})")
        else:
            yield Finding("note", f"extra {extra} is not installed", f'pip install "fedvlm[{extra}]" if you need it')


def _backbone() -> Finding:
    try:
        from fedvlm import backbones  # imports torch, which `_packages` may have found broken

        model = backbones.load("mini-clip")
        embedding = model.texts(["a photo of a dog"])
        assert embedding is not None and bool(embedding.isfinite().all())
        return Finding("ok", f"mini-clip loads and encodes ({model.dim} dimensions)")
    except Exception as error:
        fix = "install fedvlm again (its files in fedvlm/backbones/assets/mini-clip)"
        return Finding("broken", f"mini-clip does not load: {type(error).__name__}: {error}", fix)


def _same_bits() -> Finding:
    """Whether an image's features are the same alone, beside others, in another order and with one core."""
    try:
        import torch
        from PIL import Image

        from fedvlm import backbones
        from fedvlm.backbones.alone import encoder_threads
        from fedvlm.backbones.arithmetic import arithmetic

        model, grey = backbones.load("mini-clip"), Image.linear_gradient("L")
        images = [grey.rotate(40 * k).convert("RGB") for k in range(9)]
        together, alone = model.images(images), torch.cat([model.images([image]) for image in images])
        with encoder_threads(1):
            turned = model.images(images[::-1]).flip(0)
        if torch.equal(together, alone) and torch.equal(together, turned):
            return Finding("ok", f"features by {arithmetic()}: an image's do not depend on those beside it (tried)")
        what = f"features by {arithmetic()}: an image's last bits depend on the images beside it"
        return Finding("broken", what, "please report this with the line above; results are right up to rounding")
    except Exception as error:
        return Finding("broken", f"features cannot be compared: {type(error).__name__}: {error}", "see the lines above")
