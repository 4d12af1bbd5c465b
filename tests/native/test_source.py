"""The emitted C++: one preset's in full, and what holds for all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memkit
from memkit import cli
from memkit.compiler.native_rule import NativeRule

from .rules import COVERED

GOLDEN = Path(__file__).parent / "linear_attention.cpp"


def source(name: str, width: int = 4) -> str:
    rule = memkit.compile(name, key_dim=width, value_dim=width, backend="native")
    assert isinstance(rule, NativeRule)
    return rule.native.module.source


@pytest.mark.without_compiler
def test_one_preset_in_full() -> None:
    """After a change that is meant:

    memkit emit linear_attention --key-dim 4 --value-dim 4 --backend native > tests/native/linear_attention.cpp
    """
    assert source("linear_attention").strip() == GOLDEN.read_text(encoding="utf-8").strip()


@pytest.mark.without_compiler
@pytest.mark.parametrize("name", COVERED)
def test_every_preset_has_source(name: str) -> None:
    text = source(name, 8)
    made = re.findall(r'extern "C" int (\w+)\(', text)
    assert len(made) == len(set(made))
    for kind in ("", "_saving", "_backward"):
        assert f"resume{kind}" in made or f"chunks{kind}" in made
    for name in made:
        assert name.removesuffix("_saving").removesuffix("_backward").removesuffix("_thin").removesuffix("_states") in made


@pytest.mark.without_compiler
def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["emit", "linear_attention", "--key-dim", "4", "--value-dim", "4", "--backend", "native"])
    assert capsys.readouterr().out.strip() == GOLDEN.read_text(encoding="utf-8").strip()


@pytest.mark.without_compiler
def test_the_command_says_why_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["emit", "exp_attention", "--backend", "native"])
    assert ended.value.code == 2 and "plan span" in capsys.readouterr().err
