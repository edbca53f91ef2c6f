"""`fedvlm demo`: what federated adaptation gains over the frozen model, on real images that come with the package.

Emoji in seven drawing styles; each style is a client, and each in turn is held out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedvlm.errors import FedvlmError
from fedvlm.system import console

if TYPE_CHECKING:
    from fedvlm.training.folder import RunFolder

METHODS = ("zero-shot", "fedavg", "fedclip", "fedot", "moments")
DEFAULTS = {
    "data": "emoji",
    "protocol": "leave-one-domain-out",
    "seeds": "50,77,98",
    "rounds": "10",
    "evaluate_every": "2",
    "out": "runs/demo",
}


def conclude(runs: list[RunFolder], picture: Path) -> None:
    """Writes a figure and the page, and says how to open it."""
    from fedvlm.report import figures
    from fedvlm.report.page import PageOptions, page

    figures.figure(runs, picture)
    folder = picture.parent
    written = folder / "demo.html"
    shown = f"page: {written.resolve().as_uri()} (open it in a browser) · "
    try:
        public = all(r.record.config.get("data") == DEFAULTS["data"] for r in runs)  # not a folder that the user gave
        page(runs, written, PageOptions(details=True, images=public))
    except FedvlmError as error:  # without jinja2
        shown = f"no page: {error}\n"
    console.out.print(f"{shown}figure: {picture} · runs: {folder}", markup=False)
    from fedvlm.studies.comparison import best_runs

    best = best_runs(runs)[0].folder
    for words in (f"predict {best} IMAGE", f"report {folder}", "choose data=FOLDER"):
        console.line(f"next: fedvlm {words}")
