"""Tables as files: CSV with all numbers, LaTeX with the metrics."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from fedvlm.report.tables import ALL_METRICS, DASH, PROTOCOL_METRICS, TENTHS
from fedvlm.system import files
from fedvlm.system.table import Table


def write_csv(tables: Mapping[str, Table], path: Path) -> None:
    """One file; of several tables the first column says which one a row is of."""
    names = ["method", *dict.fromkeys(name for table in tables.values() for name in written_columns(table))]
    first = ["data"] if len(tables) > 1 else []
    out = io.StringIO()
    writer = csv.DictWriter(out, [*first, *names], extrasaction="ignore")
    writer.writeheader()
    for title, table in tables.items():
        for row in table.values:
            writer.writerow({"data": title} | {k: "" if row.get(k) is None else row[k] for k in names})
    files.write(path, out.getvalue())


def written_columns(table: Table) -> list[str]:
    metrics = [m for group in PROTOCOL_METRICS if set(group) & set(table.columns) for m in group]
    names = [*metrics, *(f"{m}_std" for m in metrics), "seeds", "runs", "rounds", "mb", "up_mb", "down_mb"]
    names += ["shared", "private", "seconds", *TENTHS, "gap_variance"]
    names += [f"paper_{m}" for m in metrics if any(f"paper_{m}" in v for v in table.values)]
    return names + [
        k for c in table.columns for k in (c, f"{c}_pooled") if any(f"{c}_pooled" in v for v in table.values)
    ]


def latex(tables: Mapping[str, Table]) -> str:
    """Each as a booktabs table, with what is bold in the table in bold and the notes as comments."""
    return "\n\n".join(_latex(table, title if len(tables) > 1 else "") for title, table in tables.items())


def _latex(table: Table, title: str) -> str:
    metrics = [c for c in table.columns if c in ALL_METRICS]
    head = " & ".join(["Method", *metrics])
    lines = [f"% {title}"] * bool(title)
    lines += [rf"\begin{{tabular}}{{l{'r' * len(metrics)}}}", r"\toprule", rf"{head} \\", r"\midrule"]
    for row in table.rows:
        cells = [row["method"].replace("_", r"\_").replace("%", r"\%")]
        for m in metrics:
            text = row[m].replace("±", r"$\pm$").replace(DASH, "--")
            cells.append(rf"\textbf{{{text}}}" if (row["method"], m) in table.bold else text)
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *("% " + n for n in table.notes)])
