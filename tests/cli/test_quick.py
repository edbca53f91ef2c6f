"""Commands that train nothing answer at once: without torch, numpy or matplotlib, in 0.3 s of CPU time."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

import pytest
from helpers import train_small

from fedvlm.config import catalogue
from fedvlm.config.catalogue import SHIPPED, Catalogue

LIMIT = 0.3  # seconds, user and system, Python's own start included
ATTEMPTS = 6  # the best counts: another process on the same core makes a run slower, never faster
HEAVY = ("torch", "numpy", "matplotlib", "transformers", "PIL", "safetensors")
# as `python -m fedvlm`, with a last line on stderr that says what it took
WRAPPER = f"""
import json, runpy, sys, time
code = 0
try:
    runpy.run_module("fedvlm", run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
loaded = [m for m in {HEAVY} if m in sys.modules]
print(json.dumps([code, time.process_time(), loaded]), file=sys.stderr)
"""


class Ran(NamedTuple):
    code: int
    seconds: float
    loaded: list[str]
    out: str
    err: str


def ran(*words: str) -> Ran:
    done = subprocess.run([sys.executable, "-c", WRAPPER, *words], capture_output=True, text=True, check=True)
    *err, last = done.stderr.splitlines()
    return Ran(*json.loads(last), done.stdout, "\n".join(err))


@pytest.fixture(scope="module")
def known() -> Catalogue:
    """Made here if the shipped one is out of date, so that this is one failure and not one of every command."""
    return catalogue.load()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--help"], 0, "encode-server"),
        (["--version"], 0, "."),
        (["ls", "methods"], 0, "fedot"),
        (["ls", "adapters"], 0, "rotation"),
        (["ls", "presets"], 0, "unet"),
        (["ls", "backbones"], 0, "SigLIP"),
        (["show", "fedot"], 0, "weight_decay"),
        (["show", "fedot", "--yaml"], 0, "weight_decay: 0.0005"),
        (["show", "ga", "on=unet"], 0, "adapter=unet"),
        (["run", "fedoot"], 1, "did you mean fedot?"),
        (["run", "fedot", "lrr=3"], 1, "lrr= is not a key here; did you mean lr?"),
        (["run", "fedot", "lr=x"], 1, "lr=x: expected a number"),
        (["rnu"], 2, "no command 'rnu'; did you mean run?"),
        (["complete", "fedvlm run fedo"], 0, "fedot-all-local"),
        (["completion", "bash"], 0, "complete -o default"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_command_that_trains_nothing_answers_at_once(words, code, says, known):
    best = ran(*words)
    assert best.code == code and says in (best.err if code else best.out)
    assert "Traceback" not in best.err and best.loaded == []
    for _ in range(ATTEMPTS - 1):
        if best.seconds > LIMIT:
            best = min(best, ran(*words), key=lambda r: r.seconds)
    assert best.seconds <= LIMIT or best.seconds <= 2.5 * library_seconds()  # a slow machine is no fault of the command


def library_seconds() -> float:
    """CPU time of starting Python and importing the libraries that any such command needs: 0.1 s where 0.3 s is easy."""
    code = "import time, argparse, dataclasses, json, yaml, rich.console, rich.table; print(time.process_time())"
    runs = (subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3))
    return min(float(run.stdout) for run in runs)


def test_a_command_that_trains_does_load_them():
    """The check above sees what is loaded."""
    assert {"torch", "numpy"} <= set(ran("run", "fedot", "data=/not/there").loaded)


def test_importing_fedvlm_loads_nothing_heavy(known):
    code = f"import fedvlm, sys; fedvlm.run, fedvlm.methods(), str(fedvlm.describe('fedot')); heavy = {HEAVY}"
    code += "; print([m for m in heavy if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_shipped_catalogue_is_fresh():
    """Refresh it with `python tools/keys_page.py`."""
    shipped = Catalogue.from_json(SHIPPED.read_text(encoding="utf-8"))
    assert shipped.digest == catalogue.current_digest()
    assert catalogue.make(catalogue.current_digest()) == shipped


def test_a_catalogue_that_is_damaged_or_old_is_made_anew(tmp_path, monkeypatch, known):
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    for content in ("", "{", "[]", "[1, 2, 3, 4]", known._replace(digest="of another time").to_json()):
        (tmp_path / "catalogue.json").write_text(content)
        monkeypatch.setattr(catalogue, "SHIPPED", tmp_path / "catalogue.json")
        catalogue.load.cache_clear()
        assert catalogue.load() == known
    (made,) = (tmp_path / "cache").glob("catalogue-*.json")
    assert Catalogue.from_json(made.read_text(encoding="utf-8")) == known
    catalogue.load.cache_clear()


def test_what_a_run_did_is_shown_without_torch(images, tmp_path, known):
    run = train_small(images, tmp_path / "run", method="fft-gp", rounds=1)
    best = ran("show", str(run.folder))
    assert best.code == 0 and set(best.loaded) <= {"numpy"}
    assert "usable_slopes" in best.out and "mask_variation" in best.out
