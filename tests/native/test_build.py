"""Compiling: errors in the house's form, what is kept on disk, and who may share it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memkit
from memkit.compiler import native_build, native_run
from memkit.compiler.native_rule import NativeRule
from memkit.compiler.pipeline import compile_rule
from memkit.specs.errors import KernelError
from tests.cases import PRESETS, draw, small
from tests.compare import assert_close

from .conftest import forget
from .rules import COVERED

SMALL = "linear_attention"


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is known of a compiler, nothing loaded, and nothing on disk."""
    monkeypatch.setattr(native_run, "_KNOWN", {})
    monkeypatch.setenv("MEMKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MEMKIT_CXXFLAGS", "-O0")
    monkeypatch.delenv("CXX", raising=False)
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def rule_of(name: str = SMALL) -> NativeRule:
    rule = compile_rule(small(name), 4, 4, backend="native")
    assert isinstance(rule, NativeRule)
    return rule


def raised(rule: NativeRule, **options) -> str:
    with pytest.raises(KernelError) as error:
        draw(rule, **options).run(rule)
    text = str(error.value)
    assert text.startswith("KernelError at backend\n  got       ") and "\n  expected  " in text and "\n  try       " in text
    return text


@pytest.mark.without_compiler
@pytest.mark.parametrize("variable", [("CXX", "no-such-compiler"), ("PATH", "")], ids=["CXX", "PATH"])
def test_no_compiler(variable: tuple[str, str], anew: pytest.MonkeyPatch) -> None:
    anew.setenv(*variable)
    rule = rule_of()
    assert "no C++ compiler" in raised(rule)
    assert "extern" in rule.native.module.source, "it can still be read"


@pytest.mark.without_compiler
def test_auto_runs_torch_code_without_a_compiler(anew: pytest.MonkeyPatch) -> None:
    anew.setenv("PATH", "")
    rule = compile_rule(small(SMALL), 4, 4)
    draw(rule).run(rule)
    assert rule.backend.startswith("torch")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = shlex.join(native_build.compiler() or ())
    asked = f'case "$*" in *-dM*|*--version*) exec {real} "$@";; esac\n'
    text = asked + "echo note: a warning >&2\necho x.cpp:3: error: no register left >&2\nexit 1"
    anew.setenv("CXX", script(tmp_path / "c++", text))
    forget()
    found = raised(rule_of())
    assert "x.cpp:3: error: no register left" in found and "a warning" not in found


def test_a_compiler_that_is_none(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its version cannot even be asked for."""
    anew.setenv("CXX", script(tmp_path / "c++", "echo what is this >&2; exit 3"))
    forget()
    raised(rule_of())


def test_cxx_with_arguments(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in CXX="ccache g++": the arguments are part of the command."""
    real = shlex.join(native_build.compiler() or ())
    log = tmp_path / "log"
    wrapper = script(tmp_path / "wrapper", f'echo "$1" >> {log}\nexec "$@"')
    anew.setenv("CXX", f"{wrapper} {real}")
    forget()
    rule = rule_of()
    draw(rule).run(rule)
    assert set(log.read_text().split()) == {real}


def test_the_source_does_not_compile(anew: pytest.MonkeyPatch) -> None:
    anew.setenv("MEMKIT_CXXFLAGS", "-DLT=0.5 -O0")
    forget()
    assert "error:" in raised(rule_of())


def test_a_failure_is_not_kept(anew: pytest.MonkeyPatch) -> None:
    """What failed once may work later, say after the disk had room again."""
    rule = rule_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_build.subprocess, "run", lambda *args, **options: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises((KernelError, OSError)):
            draw(rule).run(rule)
    draw(rule).run(rule)


@pytest.mark.without_compiler
@pytest.mark.parametrize("name", [n for n in PRESETS if n not in COVERED])
def test_plans_without_cpp(name: str) -> None:
    with pytest.raises(KernelError) as error:
        memkit.load(name, backend="native")
    text = str(error.value)
    assert "plan span" in text and "linear, solve, frozen, orthogonal" in text and "try       backend: torch" in text


@pytest.mark.without_compiler
def test_a_loop_has_no_cpp() -> None:
    with pytest.raises(KernelError, match="plan scan"):
        memkit.compile("titans", key_dim=4, value_dim=4, plan="scan", backend="native")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """The rule computes in float32, unless its memory is narrower itself: see `Rule`. bfloat16 sequences are converted."""
    rule = rule_of()
    narrow = draw(rule, dtype=torch.float32)
    y, _ = narrow._replace(q=narrow.q.to(dtype), k=narrow.k.to(dtype), v=narrow.v.to(dtype)).run(rule)
    assert y.dtype == dtype


def test_other_devices(anew: pytest.MonkeyPatch) -> None:
    rule = rule_of()
    inputs = draw(rule).map(lambda t: t.to("meta"))
    with pytest.raises(KernelError, match="meta"):
        inputs.run(rule)


def count(anew: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that run from now on."""
    found: list[list[str]] = []
    run = subprocess.run

    def counted(command, **options):
        found.append(command)
        return run(command, **options)

    anew.setattr(native_build.subprocess, "run", counted)
    return found


def compilations(commands: list[list[str]]) -> int:
    return sum("-c" in command for command in commands)


def test_what_is_compiled_is_kept(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = count(anew)
    rule = rule_of()
    inputs = draw(rule)
    y, _ = inputs.run(rule)
    assert compilations(commands) == 2  # the function and products, which all share
    inputs.run(rule)
    inputs.piece(0, 1).run(rule)
    assert compilations(commands) == 2
    inputs.leaves().run(rule)[0].sum().backward()
    assert compilations(commands) == 4
    commands.clear()
    anew.setattr(native_run, "_KNOWN", {})
    forget()
    again = rule_of()
    assert_close(inputs.run(again)[0], y, 0.0)
    inputs.leaves().run(again)[0].sum().backward()
    assert compilations(commands) == 0, "as a new process finds it"
    assert commands, "the compiler was asked what it is"
    kept = sorted(p.suffix for p in (tmp_path / "cache" / "native").iterdir())
    assert kept == [".o", ".so", ".so", ".so"]
    anew.setattr(native_run, "_KNOWN", {})
    anew.setenv("MEMKIT_CXXFLAGS", "-O0 -DOTHER")
    forget()
    inputs.run(rule_of())
    assert compilations(commands) == 2, "other flags are another compilation"


def test_the_folder_is_the_user_s_own(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code that will run: nobody else may write it."""
    rule = rule_of()
    draw(rule).run(rule)
    assert (tmp_path / "cache" / "native").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("sort", ["a file", "read only"])
def test_a_folder_that_cannot_be_written(sort: str, anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    if sort == "a file":
        cache.write_text("")
    else:
        (cache / "native").mkdir(parents=True)
        access = os.access  # a superuser may write everywhere
        anew.setattr(native_build.os, "access", lambda path, mode: Path(path) != cache / "native" and access(path, mode))
        (cache / "native").chmod(0o500)
    rule = rule_of()
    y, _ = draw(rule).run(rule)
    assert torch.isfinite(y).all()
    assert native_build.folder() == native_build._own_folder()
    assert cache.is_file() or not list((cache / "native").iterdir())


def test_a_library_that_does_not_load_is_named(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = shlex.join(native_build.compiler() or ())
    text = f'case "$*" in *-shared*) ;; *) exec {real} "$@";; esac\nfor last; do :; done\necho no library > "$last"'
    anew.setenv("CXX", script(tmp_path / "c++", text))
    forget()
    found = raised(rule_of())
    assert f"{tmp_path / 'cache' / 'native'}/linear_attention-chunks-" in found


TWICE = """
import sys, torch
from memkit.compiler.pipeline import compile_rule
from tests.cases import draw, small
rule = compile_rule(small("retnet"), 4, 4, backend="native")
x = draw(rule).leaves()
y, _ = x.run(rule)
y.sum().backward()
print(float(y.sum()))
"""


def test_two_processes_compile_the_same_at_once(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", TWICE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [p.communicate(timeout=300) for p in both]
    assert [p.returncode for p in both] == [0, 0], told
    assert told[0][0] == told[1][0]
    kept = [p.name for p in (tmp_path / "cache" / "native").iterdir()]
    assert len(kept) == 3 and not any(name.startswith("tmp") for name in kept), "nothing half made is left behind"


def test_nothing_is_compiled_before_it_runs(anew: pytest.MonkeyPatch) -> None:
    commands = count(anew)
    rule = rule_of("titans")
    assert "plan: frozen" in rule.explain() and "backend: native" in rule.explain()
    memkit.load("titans", dim=64, backend="native")
    assert not commands


def test_the_rule_says_what_runs() -> None:
    rule = rule_of()
    assert rule.backend == "native"


@pytest.mark.parametrize("name", [SMALL, "titans"])
def test_shipped_flags(name: str, anew: pytest.MonkeyPatch) -> None:
    """As a user compiles it, in both types: equal to the token loop, and as precise."""
    from memkit.specs.reference import ReferenceRule
    from tests import laws

    anew.delenv("MEMKIT_CXXFLAGS")
    forget()

    def make(spec, key_dim: int, value_dim: int) -> NativeRule:
        rule = compile_rule(spec, key_dim, value_dim, backend="native")
        assert isinstance(rule, NativeRule)
        return rule

    laws.check_against(make, ReferenceRule, small(name), T=9)
    laws.check_precision(make, ReferenceRule, small(name), torch.float32)
