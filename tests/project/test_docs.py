"""The documentation: the site builds without warnings or network, links lead somewhere, and what pages tell to type is
accepted; short commands are run, in small. A block that is too long or needs what is not here says so before it:

    <!-- long: why -->
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pages
import pytest
import yaml
from pages import PAGES, ROOT
from papers.manifest import find
from papers.published import paper_names

import fedvlm
from fedvlm.cli import COMMANDS, _parse, main
from fedvlm.cli.commands import encode_server, evaluate, federation, join, serve
from fedvlm.cli.commands.values import values
from fedvlm.cli.demo import METHODS
from fedvlm.config import recipe
from fedvlm.config.config import key_values, resolve
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.studies import sweep

NAMES = {"METHOD": "fedot", "NAME": "fedot", "A": "fedot", "PAPER": "fedot", "TABLE": "1"}  # placeholders on pages
DROPPED = ("backbone", "rounds", "seeds", "out", "engine", "--onnx")  # what `small` leaves out


def given(words: list[str]) -> tuple[list[str], dict[str, object]]:
    """Names, and key=value."""
    return [NAMES.get(w, w) for w in words if "=" not in w], dict(key_values([w for w in words if "=" in w]))


def check_run(method: str, pairs: list[str]) -> None:
    resolve(NAMES.get(method, method), key_values(pairs))


def check_bench(words: list[str]) -> None:
    methods, keys = given(words)
    fixed, _ = sweep.separated(methods, keys)
    for method in methods:
        resolve(method, fixed)


def check_reproduce(words: list[str]) -> None:
    names, keys = given(words)
    if len(names) == 2:
        find(names[0], names[1], str(keys.pop("part", "")))
        for beside in ("figure", "methods", "outsiders", "data"):
            keys.pop(beside, None)
        resolve("fedavg", {k: v for k, v in keys.items() if k not in ("start", "text_backbone")})
    else:
        assert not names or names[0] in paper_names(), names


def check_questions(pairs: list[str]) -> None:
    assert key_values(pairs).keys() <= set(evaluate.KEYS), pairs


def check(words: list[str]) -> None:
    """An error where fedvlm would refuse these words, whatever folders there are."""
    if words == ["--version"]:
        return
    args = _parse([w for w in words if w != "--help"])
    table: dict[str, Callable[[], object]] = {
        "run": lambda: check_run(args.method, args.pairs),
        "show": lambda: args.method == "RUN" or check_run(args.method, args.pairs),
        "init": lambda: check_run(str(key_values(args.pairs).get("like", "fedavg")), without(args.pairs, "like")),
        "demo": lambda: [check_run(m, args.pairs) for m in METHODS],
        "bench": lambda: check_bench(args.words),
        "evaluate": lambda: check_questions(args.pairs),
        "serve": lambda: values(serve.KEYS, args.pairs),
        "join": lambda: values(join.KEYS, args.pairs),
        "encode-server": lambda: values(encode_server.KEYS, args.pairs),
        "federation": lambda: values(
            {"init": federation.INIT, "add": federation.ADD, "status": []}[args.what],
            [w for w in args.words if "=" in w],
        ),
    }
    table.get(args.command, lambda: None)()


def without(pairs: list[str], key: str) -> list[str]:
    return [p for p in pairs if not p.startswith(f"{key}=")]


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory, images) -> Iterator[Path]:
    """The working directory, with what pages speak of: images by domain, parts of one's own, a recipe."""
    home = tmp_path_factory.mktemp("pages")
    for domain, style in {"photo": "noto", "sketch": "twemoji", "noto": "openmoji"}.items():
        for folder in sorted((images / style).iterdir())[:2]:
            (home / "images" / domain / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[:5]:
                shutil.copy(file, home / "images" / domain / folder.name)
    shutil.copy(next(p for p in (home / "images").rglob("*") if p.is_file()), home / "image.png")
    for fence in pages.fences("docs/add-a-method.md"):
        if name := re.match(r"# (\w+\.py)\n", fence.body):
            (home / name[1]).write_text(fence.body, encoding="utf-8")
    (home / "mine.yaml").write_text("like: fedot\n", encoding="utf-8")
    shutil.copy(ROOT / "examples" / "recipe.yaml", home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("FEDVLM_RUNS", str(home / "runs"))
        yield home


def small(words: list[str], number: int) -> list[str]:
    """The same command on what is there, and short: one round, one seed, one target; `number` makes outputs new."""
    command, *rest = words
    found = [command]
    for before, word in zip([command, *rest], rest, strict=False):
        key, _, value = word.partition("=")
        if key in ("data", "outsiders") and value:
            found.append(f"{key}=images")
        elif key in ("corrupt", "lr") and "," in value:
            found.append(f"{key}={','.join(value.split(',')[: 1 + (key == 'lr')])}")
        elif "…" in word or word.startswith("runs/") or word == "RUN":
            found.append("RUN")
        elif before == "--out":
            found.append(f"out-{number}")
        elif word.endswith((".jpg", ".png")) or (word == "FOLDER" and command == "predict"):
            found.append("image.png")
        elif word == "mine.yaml" and command == "init":
            found.append(f"mine-{number}.yaml")
        elif key not in DROPPED:
            found.append(word)
    if command in ("run", "bench"):
        keys = {word.partition("=")[0] for word in found}
        found += [w for w in ("data=images", "unseen=noto", "rounds=1") if w.partition("=")[0] not in keys]
    return found + ["seeds=1", "jobs=1"] * (command == "bench")


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_accepted(page):
    """The parser, the methods and the keys of every command on the page, also in running text."""
    refused = []
    every = [(f.where, words) for f in pages.fences(page) for words in pages.commands(f)]
    for where, words in [*every, *((page, words) for words in pages.inline_commands(page))]:
        try:
            check([NAMES.get(w, w) for w in words])
        except (FedvlmError, SystemExit, AssertionError) as error:
            refused.append(f"{where}: fedvlm {' '.join(words)}: {error}")
    assert refused == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_running_text_exist(page):
    """`fedvlm COMMAND …`, also without a method."""
    named = re.findall(r"`fedvlm ([a-z][\w-]*)", pages.FENCE.sub("", pages.text_of(page)))
    assert set(named) <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_repository_that_a_page_names_exist(page):
    """Also as seen from the package, such as rounds/guard.py; NAME and PAPER stand for any."""
    prose = pages.FENCE.sub("", pages.text_of(page))
    named = re.findall(r"(?<![\w/.…-])(?!code/)((?:[\w-]+/)+[\w-]+\.(?:py|toml|sh|md|yaml))\b", prose)
    known = (ROOT, ROOT / "fedvlm", (ROOT / page).parent)
    absent = {path for path in named if not any((folder / path).exists() for folder in known)}
    assert {path for path in absent if not re.search(r"(NAME|PAPER)\.yaml$", path)} == set()


def test_short_commands_run(world, capsys):
    """Those of every block that is not marked as long; each once. The demo has tests of its own."""
    assert main(["run", "fedot", "data=images", "unseen=noto", "rounds=1", "out=RUN"]) == 0
    failed, done = [], set[str]()
    for fence in (f for page in PAGES for f in pages.fences(page) if not f.long):
        for words in pages.commands(fence):
            line = " ".join(sorted(small(words, 0)))
            if line in done or words[0] in ("demo", "--version"):
                continue
            done.add(line)
            capsys.readouterr()
            if main(small(words, len(done))) != 0:
                failed.append(f"{fence.where}: fedvlm {' '.join(words)}: {capsys.readouterr().err}")
    assert failed == [] and len(done) > 20


@pytest.mark.parametrize("page", PAGES)
def test_every_table_that_a_page_reproduces_exists(page):
    for line in re.findall(r"benchmarks/reproduce\.py ([^#`\n]*)", pages.text_of(page)):
        check_reproduce([word for word in line.split() if not word.startswith("--")])


def test_a_table_that_does_not_exist_is_found():
    with pytest.raises(FedvlmError):
        check_reproduce(["fedot", "99", "data=PACS"])


@pytest.mark.parametrize(
    "line",
    [
        "run fedott data=PATH",
        "run fedot lrr=0.1",
        "run fedot --nonesuch",
        "rnu fedot",
        "run fedot device=tpu",
        "bench fedot fedavg nonesuch=1",
        "bench fedot lr=0.1..1",
        "join north.zip dta=images",
        "federation init north prt=1",
        "evaluate RUN outsider=A",
        "init mine.yaml like=fedott",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises((FedvlmError, SystemExit, AssertionError)):
        check(line.split())


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_code_are_right(page):
    """Python compiles, and what it takes from fedvlm is there; YAML and TOML can be read."""
    for fence in pages.fences(page):
        if fence.kind == "python":
            check_python(ast.parse(fence.body, fence.where), fence.where)
        elif fence.kind == "yaml":
            assert yaml.safe_load(fence.body), fence.where
        elif fence.kind == "toml":
            assert tomllib.loads(fence.body), fence.where


def check_python(tree: ast.AST, where: str) -> None:
    objects = {"fedvlm": fedvlm, "run": fedvlm.Run, "runs": fedvlm.Runs}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedvlm"):
            module = import_module(node.module or "")
            assert all(hasattr(module, name.name) for name in node.names), f"{where}: {ast.unparse(node)}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in objects:
            owner = objects[node.value.id]
            known = hasattr(owner, node.attr) or (node.value.id == "fedvlm" and node.attr in ("seeds", "schema"))
            assert known, f"{where}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("fedvlm.run", "fedvlm.bench", "fedvlm.describe"):
            check_call(node)


def check_call(call: ast.Call) -> None:
    """Methods and keys that are written out."""
    first = ast.literal_eval(call.args[0])
    keys = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg and isinstance(k.value, ast.Constant)}
    for method in [first] if isinstance(first, str) else first:
        resolve(method, {k: v for k, v in keys.items() if not str(v).endswith(".py")})


def test_wrong_code_is_found():
    for code in (
        "import fedvlm\nfedvlm.rnu('fedot')",
        "fedvlm.run('fedot', lrr=1)",
        "from fedvlm.core.state import Nothing",
    ):
        with pytest.raises((AssertionError, FedvlmError)):
            check_python(ast.parse(code), "here")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page):
    wrong = []
    for link in pages.links(page):
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.exists():
            wrong.append(link)
        elif anchor and anchor not in pages.anchors(path.resolve().relative_to(ROOT).as_posix()):
            wrong.append(f"{link}: no such heading")
    assert wrong == []


def test_the_index_names_every_page():
    named = {link.partition("#")[0] for link in pages.links("docs/index.md")} | {"index.md"}
    assert {p.removeprefix("docs/") for p in PAGES if p.startswith("docs/")} <= named


def test_every_part_of_a_recipe_has_its_equation():
    """In the docstring of its file, which is its method's page; a network's is its architecture."""
    lack = []
    for kind in registry.AXES:
        for name in sorted(registry.built_in(kind)):
            part = registry.find(kind, name)
            said = inspect.getmodule(part).__doc__ or ""
            if not re.search(r" = |[←∝‖Σ]", said) and getattr(part, "view", "") not in ("pixels", "text"):
                lack.append(f"{kind}={name}")
    assert set(lack) == {
        "local=memory",
        "local=experts",
        "merge=experts",
        "merge=stages",
    }  # they choose among what is there


def test_the_site_builds(tmp_path, monkeypatch):
    """As `mkdocs build --strict` does: a warning is an error. Nothing in it is loaded from elsewhere."""
    pytest.importorskip("material", reason='needs pip install -e ".[docs]"')
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    build(load_config("mkdocs.yml", strict=True, site_dir=str(tmp_path)))
    made = {p.stem: p.read_text(encoding="utf-8") for p in (tmp_path / "methods").glob("*.html")}
    assert made.keys() == set(recipe.recipe_names())
    for name in ("fedot", "feddtl", "focoop"):
        for part in ("Idea and equations", "Settings", "Published results", "Our results", "Mechanisms", "Pitfalls"):
            assert f">{part}<" in made[name] or f">{part}" in made[name], (name, part)
    for page in tmp_path.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"?(?:https?:)?//", html), page
        assert not re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preload|preconnect)[^>]+href=\"?(?:https?:)?//", html), (
            page
        )
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
