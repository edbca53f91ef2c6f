"""What a terminal shows at its width: over a pseudo-terminal, tables are whole at 80, 120 and 200 columns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import DOMAINS, write

from fedvlm.core.records import MetricRecord, RoundRecord
from fedvlm.report.tables import summarise
from fedvlm.training.folder import RunFolder

pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
METHODS = ("zero-shot", "fedavg", "fedclip", "fedot-orthogonal-a", "moments", "ditto", "fedprox", "fft-gp")


def in_terminal(words: list[str], columns: int, **environment: str) -> str:
    """What a command prints in a terminal of this width, without control sequences."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    known = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", "import sys; from fedvlm.cli import main; sys.exit(main())", *words]
    done = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=known | {"TERM": "xterm"} | environment)
    os.close(theirs)
    out = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        out += part
    os.close(ours)
    assert done.wait() == 0, out.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.decode()).replace("\r", "")


def asked(run: RunFolder) -> RunFolder:
    """The run with corruption, outsiders and two metrics of one's own, one of which is no share."""
    record = run.record
    more: RoundRecord = {"cacc": 0.4127, "auroc": 0.8765, "fpr95": 0.3131}  # type: ignore[typeddict-item]
    last: RoundRecord = record.finished.last | more
    about = [MetricRecord("my_metric"), MetricRecord("brier", percent=False, lower_is_better=True)]
    result = replace(record.finished, last=last, selected=last)
    run.write("run.json", replace(record, metrics=about, result=result).to_json().encode())
    return run


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for k, method in enumerate(METHODS):
        for seed in (1, 2, 3):
            for target in DOMAINS:
                metrics = {"my_metric": 0.6 + 0.01 * k, "brier": 0.1234 + 0.01 * k}
                asked(write(root, method, target, seed, 3 * (k > 0), metrics=metrics))
    return root


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_nothing_of_a_table_is_left_out(bench: Path, columns: int) -> None:
    text = in_terminal(["compare", str(bench)], columns)
    table = summarise([RunFolder(p.parent) for p in sorted(bench.glob("*/run.json"))])
    lines = text.splitlines()
    assert {"new clients G %", "own clients P %", "my_metric %", "brier ↓", "AUROC %", "corrupted %"} <= {
        table.title(c) for c in table.columns
    }
    for column in table.columns[1:]:
        (head,) = [
            k for k, line in enumerate(lines) if re.search(rf"(^|  ){re.escape(table.title(column))}(  |$)", line)
        ]
        for row in table.rows:
            named = [
                line for line in lines[head + 1 : head + 1 + len(table.rows)] if line.startswith(f"{row['method']} ")
            ]
            assert len(named) == 1 and row[column] in named[0], (column, row["method"])
    grid = lines[next(k for k, line in enumerate(lines) if line.startswith("method")) :]
    tables = grid[: max(k for k, line in enumerate(grid) if line.startswith(METHODS[-1])) + 1]
    assert max(map(len, tables)) <= columns
    blocks = sum(line.startswith("method") for line in tables)
    assert blocks == {80: 4, 120: 2, 200: 2}[columns] and tables[0].index("new clients") < tables[0].index(
        "own clients"
    )
