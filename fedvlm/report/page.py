"""Everything that a set of run folders says, as one HTML file that opens anywhere and asks nobody for anything."""

from __future__ import annotations

import base64
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedvlm.core import FedvlmError
from fedvlm.evaluate.protocols import MEASURES, opened, row, target
from fedvlm.report import fairness
from fedvlm.report.figures import DARK, LIGHT, Look, figure
from fedvlm.report.tables import DASH, against, grouped, settings, short, summarise
from fedvlm.runs import Run

WIDEST = 24  # columns of an accuracy matrix that still can be read


def page(runs: list[Run], path: Path) -> None:
    try:
        import jinja2
    except ImportError:
        raise FedvlmError('the HTML page needs jinja2; install it with `pip install "fedvlm[report]"`') from None
    groups = grouped(runs)
    table = summarise(runs)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    # autoescape: names of domains, classes and folders are other people's text
    engine = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    html = engine.get_template("page.html.j2").render(
        title=heading(groups),
        facts=facts(groups),
        table=table,
        halved=[opened(i) for group in groups.values() for i in group],
        verdicts=against(table),
        pictures={"light": picture(figure, runs, LIGHT), "dark": picture(figure, runs, DARK)},
        fairness={"light": picture(fairness.figure, runs, LIGHT), "dark": picture(fairness.figure, runs, DARK)},
        matrices=matrices(groups),
        widest=WIDEST,
        traffic=[traffic(label, infos) for label, infos in groups.items()],
        runs=listing(runs),
        unfinished=[r.folder.name for r in runs if not r.done],
    )
    path.write_text(html, encoding="utf-8")


def heading(groups: dict[str, list[dict[str, Any]]]) -> str:
    infos = [i for group in groups.values() for i in group]
    return f"{each(i['data']['name'] for i in infos)} with {each(i['backbone']['name'].split('@')[0] for i in infos)}"


def facts(groups: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    infos = [i for group in groups.values() for i in group]
    data = [i["data"] for i in infos]
    return {
        "data": each(f"{d['name']}: {d['images']:,} examples, {classes(d)}" for d in data),
        "domains": each(", ".join(d["domains"]) for d in data),
        "backbone": each(i["backbone"]["name"] for i in infos),
        "split": each("/".join(f"{s:g}" for s in i["config"]["split"]) + " % train/val/test" for i in infos),
        "held out": each(target(i) for i in infos),
        "seeds": each(i["config"]["seed"] for i in infos),
        "rounds": "; ".join(f"{k}: {each(i['result']['last']['round'] for i in v)}" for k, v in groups.items()),
        "versions": each(", ".join(f"{k} {v}" for k, v in i["versions"].items() if k != "commit") for i in infos),
        "commit": each(i["versions"].get("commit") or "unknown" for i in infos),
    }


def classes(data: dict[str, Any]) -> str:
    novel = len(data.get("novel", []))
    return f"{len(data['classes'])} classes" + (f" trained on and {novel} kept from everybody" if novel else "")


def each(values: Any) -> str:
    """Every different value once, in order of appearance."""
    return ", ".join(dict.fromkeys(map(str, values)))


def percent(value: float | None) -> str:
    return DASH if value is None or np.isnan(value) else f"{100 * value:.1f}"


def picture(draw: Callable[[list[Run], Path, Look], None], runs: list[Run], look: Look) -> str:
    with tempfile.TemporaryDirectory() as folder:
        draw(runs, Path(folder) / "figure.png", look)
        return base64.b64encode((Path(folder) / "figure.png").read_bytes()).decode()


def matrices(groups: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A heat map a method, on one scale of colour."""
    found = {label: accuracies(infos) for label, infos in groups.items()}
    known = [v for cells in found.values() for v, _ in cells.values() if not np.isnan(v)]
    low, span = (min(known), max(known) - min(known) or 1.0) if known else (0.0, 1.0)
    out = []
    for label, cells in found.items():
        names = sorted({name for _, name in cells})
        rows: dict[str, list[dict[str, Any]]] = {gone: [] for gone in sorted({gone for gone, _ in cells})}
        for gone, name in ((gone, name) for gone in rows for name in names):
            value, held = cells.get((gone, name), (np.nan, False))
            rows[gone].append(
                {"text": percent(value), "heat": round(np.nan_to_num((value - low) / span), 3), "held": held}
            )
        if 0 < len(names) <= WIDEST:
            out.append({"label": label, "names": names, "rows": rows})
    return out


def accuracies(infos: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, bool]]:
    """(held out, tested) → test accuracy, mean over seeds, and whether nobody trained on it."""
    cells: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for info in infos:
        for name, entry in row(info).items():
            cells[target(info), name].append(entry)
    return {key: (float(np.mean([v for v, _ in found])), found[0][1]) for key, found in cells.items()}


def traffic(label: str, infos: list[dict[str, Any]]) -> dict[str, str]:
    """What went over the wire in training, all clients together; scoring is not counted."""
    line = {"method": label, "clients a round": each(i["result"]["last"].get("asked", DASH) for i in infos)}
    for way in ("up", "down"):
        total = float(np.mean([i["result"][f"bytes_{way}"] for i in infos]))
        line[f"{way} a round"] = size(total / max(1, infos[0]["result"]["last"]["round"]))
        line[f"{way} in all"] = size(total)
    return line


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count else "0"


def listing(runs: list[Run]) -> list[dict[str, str]]:
    """The finished runs, each with the settings in which they are not all alike."""
    found = [(r.folder.name, r.info) for r in runs if r.done]
    flat = [settings(info) for _, info in found]
    kinds = {k: {short(f[k]) for f in flat if k in f} for f in flat for k in f}
    some, every = (kind(opened(info) for _, info in found) for kind in (any, all))
    measures = [*(() if every else ("G", "P")), *(MEASURES if some else ())]
    out = []
    for (name, info), mine in zip(found, flat, strict=True):
        own = ", ".join(f"{k}={short(v) or 'none'}" for k, v in mine.items() if len(kinds[k]) > 1)
        last = info["result"]["last"]
        line = {"folder": name, "method": info["method"], "held out": target(info), "seed": str(info["config"]["seed"])}
        line |= {m: percent(last.get(m)) for m in measures}
        out.append(line | {"settings that differ": own or DASH})
    return out
