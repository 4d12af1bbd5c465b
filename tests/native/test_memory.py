"""C++ reads and writes nothing but its arrays, all of what it is to write, and no more scratch memory than it asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from memkit.compiler import native_build, native_run
from memkit.compiler.native_rule import NativeRule
from memkit.inputs import values_and_gradients
from tests.cases import draw, small
from tests.compare import assert_all_close
from tests.compiler.agree import compiled

from .conftest import POISONED, forget
from .rules import COVERED, ONE_OF_EACH_PLAN, native, preset

BAND = 257  # numbers on each side of an array, which then begins at no whole vector


class Guarded:
    """Arrays between bands of NaN."""

    def __init__(self) -> None:
        self.bands: list[Tensor] = []

    def held(self, x: Tensor) -> Tensor:
        """x between bands."""
        whole = x.new_full((x.numel() + 2 * BAND,), float("nan"))
        self.bands += [whole[:BAND], whole[BAND + x.numel() :]]
        return whole[BAND : BAND + x.numel()].view(x.shape).copy_(x.detach())


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    guard, run, empty = Guarded(), native_run.run, native_run.empty
    monkeypatch.setattr(native_run, "run", lambda inputs, *rest: [x.clone() for x in run([guard.held(x) for x in inputs], *rest)])
    monkeypatch.setattr(native_run, "empty", lambda *args: {n: guard.held(x) for n, x in empty(*args).items()})
    yield guard
    assert guard.bands and all(bool(torch.isnan(b).all()) for b in guard.bands)


@pytest.mark.parametrize("name", COVERED)
def test_bands_stay_as_they_are_and_are_not_read(name: str, guarded: Guarded) -> None:
    """Results start as NaN too: what is not written would show. The same numbers as without bands, whose arrays are aligned."""
    rule = preset(name)
    x = draw(rule, B=1, T=7, H=2)
    _, state = x.piece(0, 1).run(rule)
    found = values_and_gradients(rule, x.piece(1, 7), state.detach())
    assert len(guarded.bands) > 40
    assert all(bool(torch.isfinite(t).all()) for t in found.values())
    want = values_and_gradients(native(small(name), 4, 4), x.piece(1, 7), state.detach())
    assert_all_close(found, want, 1e-12, name)


def test_inputs_stay_as_they_are() -> None:
    for name in ONE_OF_EACH_PLAN:
        rule = preset(name)
        x = draw(rule, T=7)
        before = {n: t.clone() for n, t in x.named().items()}
        _, state = x.run(rule)
        kept = state.clone()
        values_and_gradients(rule, x, state)
        assert all(torch.equal(t, before[n]) for n, t in x.named().items())
        assert all(torch.equal(t, kept.weights[n]) for n, t in state.weights.items())


@pytest.mark.parametrize("names", [COVERED[::2], COVERED[1::2]], ids=["some", "others"])
def test_arrays_at_the_border_of_memory(names: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.native.fences", *names], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "nothing strayed" in done.stdout, done.stdout[-200:] + done.stderr[-3000:]


def test_scratch_memory_waits_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter and longer calls, other numbers of heads, and the numbers that the last call left."""
    monkeypatch.setenv("MEMKIT_CXXFLAGS", "-O0")
    monkeypatch.setattr(native_run, "_KNOWN", {})
    forget()
    for name in ONE_OF_EACH_PLAN:
        rule, plain = NativeRule(compiled(small(name), 4, 4, 3)), compiled(small(name), 4, 4, 3)
        for tokens, heads in ((9, 2), (40, 1), (5, 3)):
            x = draw(rule, B=1, T=tokens, H=heads)
            assert_all_close(values_and_gradients(rule, x), values_and_gradients(plain, x), 1e-9, name)
    monkeypatch.undo()
    forget()


def test_scratch_memory_is_poisoned_in_these_tests() -> None:
    """What is read before it is written is NaN, and what is touched behind the end stops the program: see poisoned.h."""
    assert str(POISONED) in native_build.flags()
