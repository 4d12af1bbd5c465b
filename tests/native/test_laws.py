"""C++ obeys the law table for every preset that has it, and is as precise in float32 as the token loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memkit.inputs import values_and_gradients
from memkit.specs.reference import ReferenceRule
from tests import laws
from tests.cases import draw, small, spec_of
from tests.compare import assert_all_close, assert_close

from .rules import COVERED, native, preset

CUTS = {  # pieces, and the age of the state they start from
    "token by token": ([1] * 9, 0),
    "inside a chunk": ([3, 6], 0),
    "inside a window": ([2, 1, 4], 5),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", COVERED)
def test_split(name: str, cut: str) -> None:
    pieces, prefix = CUTS[cut]
    laws.check_split(native, small(name), pieces, prefix=prefix)


@pytest.mark.parametrize("name", COVERED)
def test_the_future_and_other_rows_do_not_matter(name: str) -> None:
    """One row or head alone may be summed in another order than among others: to rounding."""
    laws.check_causality(native, small(name), tol=1e-12)
    laws.check_order(native, small(name))


@pytest.mark.parametrize("name", COVERED)
def test_an_idle_memory_stays(name: str) -> None:
    laws.check_idle(native, small(name), tol=1e-14)


@pytest.mark.parametrize("name", COVERED)
def test_modes(name: str) -> None:
    """With gradients other C++ runs than without: equal to rounding."""
    laws.check_modes(native, small(name), tol=1e-12)


@pytest.mark.parametrize("name", COVERED)
def test_state(name: str) -> None:
    laws.check_state(native, small(name))


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", COVERED)
def test_float32(name: str) -> None:
    laws.check_precision(native, ReferenceRule, small(name), torch.float32)


@pytest.mark.parametrize("name", COVERED)
def test_states_go_from_backend_to_backend(name: str) -> None:
    """A state made by the token loop continues in C++, and the other way round, inside a chunk and a window."""
    rule, loop = preset(name), ReferenceRule(small(name), 4, 4)
    inputs = draw(rule, T=9)
    want, end = inputs.run(loop)
    exact = {n: t for n, t in end.state_dict().items() if isinstance(t, Tensor)}
    for first, second in ((loop, rule), (rule, loop)):
        head, state = inputs.piece(0, 5).run(first)
        tail, after = inputs.piece(5, 9).run(second, state)
        assert_close(torch.cat([head, tail], 1), want, laws.TOL, name)
        assert_all_close({n: t for n, t in after.state_dict().items() if isinstance(t, Tensor)}, exact, laws.TOL, name)


@pytest.mark.parametrize("name", COVERED)
def test_one_token_of_three_sequences(name: str) -> None:
    rule, loop = preset(name), ReferenceRule(small(name), 4, 4)
    inputs = draw(rule, B=3, T=1, H=1)
    assert_close(inputs.run(rule)[0], inputs.run(loop)[0], laws.TOL, name)
    want, state = draw(rule, B=3, T=4, H=1).run(loop)
    assert_close(inputs.run(rule, state)[0], inputs.run(loop, state)[0], laws.TOL, name)


@pytest.mark.parametrize("tokens", [32, 33, 77])
def test_weights_that_exist_a_token_are_made_in_blocks(tokens: int) -> None:
    """A chunk of 64 tokens takes two calls, which hand over slots, weights and the window's past."""
    spec = spec_of("atlas", {"features": "identity", "window.size": 3, "update.chunk_size": 64, "optimizer.steps": 1})
    rule, oracle = native(spec, 3, 3, tile=64), ReferenceRule(spec, 3, 3)
    x = draw(rule, B=1, T=tokens, H=1)
    assert_all_close(values_and_gradients(rule, x), values_and_gradients(oracle, x), 1e-9, "blocks")
