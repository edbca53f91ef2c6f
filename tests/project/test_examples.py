"""The examples, the code on docs/add-a-method.md, and the files about the project run and are up to date."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shutil
import tomllib
from pathlib import Path
from types import ModuleType

import open_clip_models
import pytest
import yaml
from siglip_models import siglip_folder

import fedvlm
from fedvlm.cli import main
from fedvlm.parts import registry
from fedvlm.training.folder import RunFolder

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """A copy of the examples, as the working directory; runs go there, too."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.setenv("FEDVLM_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return tmp_path


def example(name: str) -> ModuleType:
    """A script of examples/, with few images."""
    shapes = importlib.import_module("shapes")
    shapes.EACH = 5  # type: ignore[attr-defined]
    return importlib.import_module(name)


def test_the_notebook_runs(work):
    """Its cells in order; the value of a cell's last line is what a notebook would show."""
    book = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({c["id"] for c in book["cells"]}) == len(book["cells"])
    space: dict[str, object] = {}
    shown: list[object] = []
    for cell in book["cells"]:
        assert cell["metadata"] == {} and cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "markdown":
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None
        *lines, last = ast.parse("".join(cell["source"])).body
        assert isinstance(last, ast.Expr)
        exec(compile(ast.Module(lines, []), cell["id"], "exec"), space)
        shown.append(eval(compile(ast.Expression(last.value), cell["id"], "eval"), space))
    count, table, figure, record, predictions, shapes, comparison, metric, about = shown
    assert count == len(space["images"]) > 0  # type: ignore[arg-type]
    assert "fedot" in str(table) and figure.get_axes() and record["round"] == 10  # type: ignore[attr-defined, index]
    assert all(p[0][0] in space["CLASSES"] for p in predictions)  # type: ignore[attr-defined, operator]
    assert set(shapes) == {"head", "skew"}  # type: ignore[call-overload]
    assert all(name in str(comparison) for name in ("zero-shot", "fedavg", "fedot"))
    assert 0 <= metric["personal"]["test"] <= 1 and "adapter.blocks" in str(about)  # type: ignore[index]


def test_the_script_runs(work, capsys):
    runpy.run_path("embeddings.py", run_name="__main__")
    out = capsys.readouterr().out
    assert "fedot" in out and "fedavg" in out and "prediction for a new square" in out


def test_two_hospitals_in_processes_and_in_one_have_the_same_bits(work, capsys, bytes_only):
    run = example("two_hospitals").main()
    text = capsys.readouterr().out
    assert text.count("ledger and the server's: the same") == 2 and "in one process: the same bits" in text
    assert "its own skew" in text and "skew" not in "".join(re.findall(r"left .*", text))
    assert fedvlm.runs("runs").table() is not None and (run.folder / "received.jsonl").stat().st_size > 0


def test_methods_are_compared_and_ours_beside_fedavg(work, capsys, monkeypatch):
    compare = example("compare_methods")
    monkeypatch.setattr(compare, "METHODS", ["fedavg"])
    runs = compare.main()
    assert len(runs) == 12 and "data:image/jpeg" in Path("compared.html").read_text(encoding="utf-8")
    example("add_a_method").main()
    text = capsys.readouterr().out
    assert "chosen: fedavg lr=" in text and "ink's private shift has the length 0." in text
    assert "sent to the server: head\n" in text


def test_a_module_is_a_backbone(work, capsys):
    example("bring_your_model").main("mini-clip")
    text = capsys.readouterr().out
    assert "object:Encoder" in text and "prediction: [('" in text and "backbone mini-clip" in text


@pytest.mark.parametrize("path", sorted((EXAMPLES / "docker").iterdir()), ids=lambda p: p.name)
def test_containers_are_made_of_what_is_there(path):
    """What docker would copy and install exists; nothing runs as root or asks a network."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    copied = [w for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for w in line.split()[:-1]]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) <= allowed and all((ROOT / name).exists() for name in copied)
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = set(re.findall(r"\.\[([\w,]+)\]", text)[0].split(","))
    assert asked <= about["optional-dependencies"].keys()
    assert {about["readme"], *about["license-files"], "pyproject.toml", "fedvlm"} <= set(copied)
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000"] and "HF_HUB_OFFLINE=1" in text


def test_every_example_is_listed():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w.]+)\)", page))
    assert {p.name for p in EXAMPLES.iterdir() if p.name not in ("README.md", "shapes.py", "__pycache__")} == listed


def test_the_recipe_runs_with_its_own_parts(work, images, capsys):
    assert main(["run", "recipe.yaml", f"data={images}", "unseen=noto", "rounds=2", "out=run"]) == 0
    assert "next: fedvlm report run --details\nnext: fedvlm predict run IMAGE\n" in capsys.readouterr().out
    record, last = RunFolder(Path("run")).record, RunFolder(Path("run")).rounds()[-1]
    assert record.adapter.code == "my_adapter.py" and record.method.title == "FedShift"
    assert set(last["metrics"]) == {"my_metric", "ece"} and 0 <= last["metrics"]["my_metric"]["shared"]["test"] <= 1
    assert set(fedvlm.Run("run").parameters("twemoji")) == {"head", "shift"}


def test_the_parts_on_the_page_run_together(work, images):
    page = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL))
    assert files.pop("npz.py")  # a format of data, which tests/data/test_formats.py installs
    assert set(files) == {"my_adapter.py", "smooth.py", "momentum.py", "my_metric.py", "link.py"}
    for name, text in files.items():
        if (EXAMPLES / name).exists():
            assert (EXAMPLES / name).read_text(encoding="utf-8") == text, name
        Path(name).write_text(text, encoding="utf-8")
    words = ["adapter=my_adapter.py", "local=smooth.py", "merge=momentum.py", "metrics=my_metric.py", "engine=link.py"]
    keys = ["strength=0.5", "smoothing=0.2", "beta=0.5", "lr=0.01", "rounds=2", "unseen=noto", "out=run"]
    assert main(["run", "fedavg", f"data={images}", *words, *keys]) == 0
    run = fedvlm.Run("run")
    homes = {p.relative_to("run/code").as_posix() for p in Path("run/code").rglob("*.py")}
    assert homes == {
        "adapter/my_adapter.py",
        "local/smooth.py",
        "merge/momentum.py",
        "metric-my_metric/my_metric.py",
        "engine/link.py",
    }
    state = run.files.load()
    assert state is not None and "velocity.head" in state[0].server
    assert run.rounds[2]["loss"] < run.rounds[1]["loss"]


def test_the_page_names_every_group_of_entry_points():
    page = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    named = set(re.findall(r'entry-points\."(fedvlm\.\w+)"', page))
    assert named == {kind.group for kind in registry.KINDS.values()} | {"fedvlm.backbones"}


def test_methods_on_the_pages_exist():
    """Every `fedvlm run METHOD` and `fedvlm show METHOD` names a recipe."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for words in re.findall(r"fedvlm (?:run|show) ([\w-]+)(?= |`)", page.read_text(encoding="utf-8")):
            assert words in (*fedvlm.methods(), "METHOD", "NAME", "RUN"), f"{page.name}: {words}"


def test_the_citation_is_of_this_version():
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (about["title"], about["license"], about["cff-version"]) == ("fedvlm", "Apache-2.0", "1.2.0")
    assert about["version"] == fedvlm.__version__


def test_the_walk_with_own_images_and_models_runs(work, capsys, monkeypatch):
    """A random SigLIP and a random open_clip model stand for the user's own."""
    siglip, open_clip = work / "siglip", work / "open-clip"
    open_clip.mkdir()
    siglip_folder(siglip)
    open_clip_models.write_model("vit", open_clip, open_clip_models.shapes("vit"))
    monkeypatch.setattr("sys.argv", ["own_data.py", "--siglip", str(siglip), "--open-clip", str(open_clip)])
    runpy.run_path("own_data.py", run_name="__main__")
    text = capsys.readouterr().out
    assert text.count("$ fedvlm ") == 9 and "auroc@flowers" in text and "cacc@fog" in text
    home = Path("own-data")
    assert RunFolder(home / "flowers-run").record.data.classes == ["daisy", "rose", "violet"]
    assert {RunFolder(home / name).record.backbone.name for name in ("siglip", "open-clip")} == {
        str(siglip),
        str(open_clip),
    }
    assert (home / "elsewhere" / "model.onnx").is_file() and (home / "elsewhere" / "backbone").is_dir()
    [(label, probability)] = fedvlm.load(home / "elsewhere").predict(home / "hospitals" / "images" / "east-rose-00.png")
    assert label in ("daisy", "rose", "violet") and 0 < probability <= 1
