"""Every key has a meaning, and a word that is no key or command is answered by what was meant."""

from __future__ import annotations

import keys_page
import pytest

from fedvlm.cli import main
from fedvlm.cli.doctor import Finding
from fedvlm.config import catalogue
from fedvlm.config.keys import keys_of


def all_keys():
    known = catalogue.load()
    yield from (("run", k) for k in known.run)
    yield from (
        (f"{kind}={n}", k) for kind, found in known.parts.items() for n, part in found.items() for k in part.keys
    )


def test_every_key_has_a_meaning():
    """The comment behind its field."""
    assert [f"{where} {key.name}" for where, key in all_keys() if not key.help] == []


def test_the_page_of_keys_is_current():
    """Refresh it with `python tools/keys_page.py`."""
    text = keys_page.PAGE.read_text(encoding="utf-8")
    assert text == keys_page.page(catalogue.load())
    assert all(f"| `{key.name}` |" in text for _, key in all_keys())


def test_a_key_with_one_meaning_has_one_row_with_its_default_for_each_part():
    found = list(keys_page.of_parts(catalogue.load().parts["adapter"]))
    private = [row for row in found if row[0] == "`private`"]
    assert len({(key, allowed, meaning) for key, _, allowed, meaning, _ in found}) == len(found)
    assert "none: the others" in private[0][4] and "`skew`: rotation" in private[0][4] and private[0][1] == "by part"
    assert [row[4] for row in found if row[0] == "`precision`" and "context" in row[3]] == ["as `position`"]


def test_a_comment_inside_brackets_is_a_meaning():
    from fedvlm.config.config import Config

    assert {k.name: k.help for k in keys_of(Config)}["dp"].startswith("differential privacy")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run fedot --lr 0.1", "unrecognised: --lr; keys are written lr=0.1"),
        ("run fedot --lr=0.1", "keys are written lr=0.1"),
        ("run fedot --weight-decay 0.1 rounds=2", "keys are written weight_decay=0.1"),
        ("run fedot --rounds", "keys are written rounds=…"),
        ("run fedot --nonesuch", "unrecognised: --nonesuch"),
        ("rnu fedot", "did you mean run?"),
        ("fedot data=x", "fedot is a method: fedvlm run fedot"),
    ],
)
def test_options_and_commands_that_there_are_not(line, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_without_a_command_the_first_steps_are_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2 and "fedvlm run fedot data=FOLDER --dry" in capsys.readouterr().out


def test_run_method_help_lists_every_key(capsys):
    assert main(["run", "fedot", "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: fedvlm run" in text and "--dry" in text
    for where, key in all_keys():
        if where in ("run", "adapter=rotation", "local=sgd"):
            assert f"  {key.name} " in text and key.help in text
    assert main(["run", "fedoot", "--help"]) == 1
    with pytest.raises(SystemExit):
        main(["run", "--help"])


def test_brackets_of_advice_are_printed(monkeypatch, capsys):
    """Rich would take [onnx] for markup."""
    from fedvlm.cli.commands import doctor

    finding = Finding("note", "extra onnx [is] not installed", 'pip install "fedvlm[onnx]" if you need it')
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.strip() == f"note   {finding.what} → {finding.fix}"
