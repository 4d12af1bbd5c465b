"""Threads share heads, and the steps of a head: results are the same for any number of them, to rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from memkit.compiler import native_build, native_run
from memkit.compiler.native import step
from memkit.compiler.native.arena import Memory, Waits
from memkit.inputs import values_and_gradients
from tests.cases import draw
from tests.compare import assert_all_close, assert_close

from . import rules
from .conftest import forget
from .rules import WIDE, drawn_wide, preset, wide


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("optimised", "_threads_as_before")
@pytest.mark.parametrize("case", WIDE)
def test_any_number_of_threads(case: str) -> None:
    """1, 2, 3 and 5 threads for 1, 2 and 3 heads; three whole chunks and a short one, from a state inside a chunk."""
    rule = wide(case)
    for heads in (1, 2, 3):
        inputs = drawn_wide(rule, 76, heads)
        torch.set_num_threads(1)
        _, state = inputs.piece(0, 2).run(rule)
        rest, start = inputs.piece(2, 76), state.detach()
        want = values_and_gradients(rule, rest, start)
        quiet, _ = rest.run(rule, start)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert_all_close(values_and_gradients(rule, rest, start), want, 1e-11, f"{case}, {heads} heads, {threads} threads")
            assert_close(rest.run(rule, start)[0], quiet, 1e-11, f"{case}, {heads} heads, {threads} threads, no gradients")


@pytest.mark.usefixtures("optimised", "_threads_as_before")
@pytest.mark.parametrize("case", ["features of degree 3", "solve with a window and momentum"])
def test_members_that_share_every_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps, too, which each member otherwise makes for itself: what one of them makes, the others wait for."""
    for limit in ("SMALL", "ALONE", "CHEAP"):
        monkeypatch.setattr(step, limit, 0)
    monkeypatch.setattr(native_run, "_KNOWN", {})
    monkeypatch.setattr(rules, "_RULES", {})
    rule = wide(case)
    inputs = drawn_wide(rule, 40, 1)
    torch.set_num_threads(1)
    want = values_and_gradients(rule, inputs)
    torch.set_num_threads(5)
    for _ in range(8):  # members that do not wait are often, not always, too early
        assert_all_close(values_and_gradients(rule, inputs), want, 1e-11, case)


@pytest.mark.usefixtures("optimised", "_threads_as_before")
@pytest.mark.parametrize("case", ["solve", "frozen"])
def test_twice_the_same(case: str) -> None:
    """With the same number of threads, to the last bit: members add to nothing that another adds to."""
    rule = wide(case)
    inputs = drawn_wide(rule, 50, 2)
    torch.set_num_threads(4)
    first = values_and_gradients(rule, inputs)
    for _ in range(3):
        assert_all_close(values_and_gradients(rule, inputs), first, 0.0, case)


@pytest.mark.usefixtures("optimised")
def test_several_threads_call_at_once() -> None:
    rule = wide("frozen")
    inputs = [draw(rule, B=1, T=30, H=2, seed=seed) for seed in range(8)]
    want = [values_and_gradients(rule, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: values_and_gradients(rule, x), inputs))
    for a, b in zip(found, want):
        assert_all_close(a, b, 0.0)


@pytest.mark.usefixtures("optimised", "_threads_as_before")
@pytest.mark.parametrize("threads", [1, 4])
def test_subnormal_numbers_are_zero(threads: int) -> None:
    """In every thread of a call, and in none after it."""
    torch.set_num_threads(threads)
    rule = preset("linear_attention")
    zeros, ones = torch.zeros(1, 5, 6, 4, dtype=torch.float64), torch.ones(1, 5, 6, 4, dtype=torch.float64)
    for number, expected in ((1e-310, 0.0), (1e-300, 4e-300)):
        y, _ = rule(ones, zeros, zeros, {}, {"W": torch.full((6, 4, 4), number, dtype=torch.float64)})
        assert torch.equal(y, torch.full_like(y, expected))
    small = torch.full((10**6,), 1e-310, dtype=torch.float64)  # large enough for all threads that torch has
    assert torch.equal((small * 1.0).view(torch.int64), small.view(torch.int64))  # bits: where they are flushed, 1e-310 == 0


@pytest.mark.usefixtures("optimised", "_threads_as_before")
def test_threads_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch brought none, or not the compiler's: threads of the call's own."""
    rule = wide("solve")
    inputs = drawn_wide(rule, 50, 3)
    want = values_and_gradients(rule, inputs)
    monkeypatch.setenv("MEMKIT_CXXFLAGS", "-O1 -ftree-vectorize -fno-openmp")
    known = native_run._KNOWN[rule.native.key]
    monkeypatch.setattr(known, "loaded", {})
    forget()
    try:
        assert native_build.flags()[-1] == "-fno-openmp"
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert_all_close(values_and_gradients(rule, inputs), want, 1e-11, f"{threads} threads")
    finally:
        monkeypatch.undo()
        forget()


PROCESS = """
import os, torch
from tests.cases import draw
from tests.native.rules import preset
rule = preset("titans_linear")
x = draw(rule, B=1, T=7, H=3)
torch.set_num_threads(1)
one = x.run(rule)[0]
"""
FEWER = "torch.set_num_threads(4); print(torch.equal(x.run(rule)[0], one))"
FORK = """
pid = os.fork()
fine = True if pid else torch.equal(x.run(rule)[0], one) and bool(x.map(lambda t: t.float()).run(rule)[0].isfinite().all())
print(os.waitpid(pid, 0)[1] == 0 if pid else fine)
"""


def process(code: str, **variables: str) -> list[str]:
    """The lines that a process prints."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS + code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_fewer_threads_than_were_asked_for() -> None:
    """A limit of OpenMP's own does not leave members waiting for others that never come."""
    assert process(FEWER, OMP_THREAD_LIMIT="2") == ["True"]


def test_a_forked_process_runs() -> None:
    """As a loader's workers are made; it can compile, too, without its parent's threads."""
    assert process(FORK) == ["True", "True"]


@pytest.mark.without_compiler
def test_what_was_read_is_waited_for_too() -> None:
    """A loop may write where a slow member still reads, though nobody has written."""
    waits = Waits()
    assert not waits
    waits.note([(Memory("mine", 0, 16), None)], [])
    assert waits
