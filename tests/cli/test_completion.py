"""Completion in the shell: the words that fit at the end of a command line, and the scripts that ask for them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from fedvlm.cli import COMMANDS, main
from fedvlm.cli.commands.completion import complete
from fedvlm.config import recipe
from fedvlm.parts import registry

BASH = shutil.which("bash")


def test_commands():
    assert set(complete("fedvlm ")) == {*COMMANDS, "--help", "--version"}
    assert complete("fedvlm ru") == ["run"] and complete("fedvlm --v") == ["--version"]
    assert complete("fedvlm re") == ["report", "resume"]
    assert complete("fedvlm nosuch ") == [] and complete("fedvlm nosuch") == []
    assert complete("fedvlm") == complete("fedvlm ") and complete("") == complete("fedvlm ")


@pytest.mark.parametrize("verb", ["run", "show", "bench"])
def test_methods(verb):
    assert complete(f"fedvlm {verb} ") == recipe.recipe_names()
    assert complete(f"fedvlm {verb} fedo") == [n for n in recipe.recipe_names() if n.startswith("fedo")]
    assert complete(f"fedvlm {verb} nosuch") == []


def test_bench_takes_several_methods():
    found = complete("fedvlm bench fedot fedc")
    assert "fedclip" in found and all(name.startswith("fedc") for name in found)
    assert "rounds=" in complete("fedvlm bench fedot r") and "fedclip" not in complete("fedvlm run fedot fedc")


def test_keys_are_those_of_the_method_and_of_the_parts_that_were_chosen():
    assert complete("fedvlm run fedot blo") == ["blocks="] and complete("fedvlm run fedavg blo") == []
    assert complete("fedvlm run fedot l") == ["launch=", "launcher=", "local=", "log=", "lr="]
    assert complete("fedvlm run fedprox m")[-1] == "mu=" and "mu=" not in complete("fedvlm run fedavg m")
    assert "mu=" in complete("fedvlm run fedavg local=prox m")
    assert "hidden=" not in complete("fedvlm run ga h") and "hidden=" in complete("fedvlm run ga on=lstm h")
    assert {"rounds=", "on=", "adapter=", "merge=", "weights="} <= set(complete("fedvlm show fedot "))


def test_a_key_that_was_given_is_not_offered_again():
    assert complete("fedvlm run fedot lr=0.1 l") == ["launch=", "launcher=", "local=", "log="]
    assert complete("fedvlm run fedot lr=0.1 local=prox l") == ["launch=", "launcher=", "log="]


def test_keys_of_a_users_recipe_and_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("like: fedprox\n")
    assert "mu=" in complete("fedvlm run my.yaml m")
    (tmp_path / "idea.py").write_text(
        "from dataclasses import dataclass\nfrom fedvlm.parts import Head\n\n\n"
        "@dataclass(frozen=True)\nclass Idea(Head):\n    strength: float = 1.0\n"
    )
    assert complete("fedvlm run fedavg adapter=idea.py str") == ["strength=", "stride="]
    for unfinished in ("nosuch.yaml", "nosuch", "fedavg adapter=nosuch.py", "fedavg adapter=nosuch", "ga on=nosuch"):
        assert "rounds=" in complete(f"fedvlm run {unfinished} ro")  # the run's own keys always fit


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run fedot optimiser=", ["optimiser=adam", "optimiser=adamw", "optimiser=sgd"]),
        ("run fedot optimiser=ada", ["optimiser=adam", "optimiser=adamw"]),
        ("run fedot cosine=", ["cosine=false", "cosine=true"]),
        ("run fedot cosine=t", ["cosine=true"]),
        ("run fedot protocol=l", ["protocol=leave-one-domain-out"]),
        ("run fedot engine=", ["engine=auto", *(f"engine={n}" for n in registry.names("engine"))]),
        ("run fedot metrics=e", ["metrics=ece"]),
        ("run ga on=", [f"on={n}" for n in recipe.presets()]),
        ("run ga on=u", ["on=unet"]),
        ("run fedot adapter=", [f"adapter={n}" for n in registry.names("adapter")]),
        ("run fedot adapter=ro", ["adapter=rotation"]),
        ("run fedot local=", [f"local={n}" for n in registry.names("local")]),
        ("run fedot merge=tri", ["merge=trimmed"]),
        ("run fedot lr=", []),
        ("run fedot nosuch=", []),
        (
            "ls ",
            sorted(
                ["methods", "presets", "adapters", "local", "merges", "metrics", "engines", "data", "backbones", "runs"]
            ),
        ),
        ("ls me", ["merges", "methods", "metrics"]),
        ("completion ", ["bash", "fish", "zsh"]),
        ("run fedot --dr", ["--dry"]),
        ("show fedot --y", ["--yaml"]),
        ("compare x --s", ["--select"]),
        ("demo rou", ["rounds="]),
    ],
)
def test_values_choices_and_options(line, expected):
    assert complete(f"fedvlm {line}") == expected


@pytest.mark.parametrize("verb", ["compare", "report", "resume", "predict", "export"])
def test_run_folders(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDVLM_RUNS")
    for name in ("fedot-a", "fedavg-b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "other").mkdir()
    expected = [str(tmp_path.joinpath("runs", n).relative_to(tmp_path)) for n in ("fedavg-b", "fedot-a")]
    assert complete(f"fedvlm {verb} ") == expected and complete(f"fedvlm {verb} {expected[1][:-2]}") == expected[1:]


def test_run_folders_are_where_runs_go(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVLM_RUNS", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere" / "a" / "run.json").write_text("{}")
    assert complete("fedvlm compare ") == [str(tmp_path / "elsewhere" / "a")]


def test_the_shells_call_it(capsys):
    assert main(["complete", "fedvlm run fedo"]) == 0
    assert capsys.readouterr().out.split() == complete("fedvlm run fedo")
    assert main(["complete"]) == 0 and capsys.readouterr().out.split() == complete("fedvlm ")
    assert main(["complete", "fedvlm nosuch "]) == 0 and capsys.readouterr().out.strip() == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_valid(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    assert "fedvlm complete" in script.read_text(encoding="utf-8")
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    subprocess.run([shell, "-n", str(script)], check=True)


LINES = """
fedvlm() {{ "{python}" -m fedvlm "$@"; }}
source "{script}"
complete -p fedvlm
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
COMP_LINE="{line}"
COMP_POINT={point}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_fedvlm 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(BASH is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("line", "words", "expected"),
    [
        ("fedvlm ru", "fedvlm ru", ["run"]),
        ("fedvlm run fedo", "fedvlm run fedo", [n for n in recipe.recipe_names() if n.startswith("fedo")]),
        ("fedvlm run ", 'fedvlm run ""', recipe.recipe_names()),
        ("fedvlm run fedot blo", "fedvlm run fedot blo", ["blocks="]),
        ("fedvlm run ga on=", 'fedvlm run ga on "="', recipe.presets()),  # bash completes what is behind =
        ("fedvlm run ga on=u", "fedvlm run ga on = u", ["unet"]),
        ("fedvlm run fedot optimiser=ada", "fedvlm run fedot optimiser = ada", ["adam", "adamw"]),
        ("fedvlm run nosuch", "fedvlm run nosuch", [""]),
    ],
)
def test_bash_completes(line, words, expected, tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out, encoding="utf-8")
    call = LINES.format(python=sys.executable, script=tmp_path / "script", line=line, point=len(line), words=words)
    done = subprocess.run([BASH, "--norc", "-c", call], capture_output=True, text=True, check=True)
    registered, *found = done.stdout.split("\n")[:-1]
    assert "-F _fedvlm" in registered and found == expected


@pytest.mark.skipif(BASH is None, reason="there is no bash here")
def test_bash_completes_where_the_cursor_is(tmp_path, capsys):
    """Not what is behind it."""
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out, encoding="utf-8")
    line = "fedvlm ru fedot"
    call = LINES.format(python=sys.executable, script=tmp_path / "script", line=line, point=9, words="fedvlm ru")
    done = subprocess.run([BASH, "--norc", "-c", call], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[1:-1] == ["run"]


def test_a_folder_with_a_name_that_a_shell_would_run_is_not_offered(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVLM_RUNS", str(tmp_path))
    for name in ("good-run", "a;touch PWNED", "$(touch PWNED)", "two words", "`x`"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    found = complete("fedvlm report ")
    assert str(tmp_path / "good-run") in found and not [n for n in found if "PWNED" in n or " " in n or "`" in n]
