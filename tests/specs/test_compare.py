"""The compare helper raises, with the place of the largest difference."""

from __future__ import annotations

import pytest
import torch

from tests.compare import assert_all_close, assert_close


def test_equal_tensors_pass() -> None:
    assert_close(torch.ones(2, 3), torch.ones(2, 3), 0.0)
    assert_all_close({"a": torch.ones(2)}, {"a": torch.ones(2) + 1e-7}, 1e-6)


def test_a_difference_is_placed() -> None:
    got = torch.zeros(2, 3)
    got[1, 2] = 0.5
    with pytest.raises(AssertionError, match=r"y: largest difference 5.000e-01 > 1.000e-09 at \[1, 2\] of \[2, 3\]: got 0.5, expected 0"):
        assert_close(got, torch.zeros(2, 3), 1e-9, "y")


def test_the_tolerance_scales_with_the_expected_size() -> None:
    assert_close(torch.tensor([1000.5]), torch.tensor([1000.0]), 1e-3)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([0.5]), torch.tensor([0.0]), 1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    for got, want in ((bad, 1.0), (1.0, bad), (bad, bad)):
        with pytest.raises(AssertionError, match="not finite"):
            assert_close(torch.tensor([got]), torch.tensor([want]), 1.0)


def test_shapes_and_names_must_agree() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(1, 3), torch.ones(3), 1.0)
    with pytest.raises(AssertionError, match="names"):
        assert_all_close({"a": torch.ones(1)}, {"b": torch.ones(1)}, 1.0)
    with pytest.raises(AssertionError, match="nothing"):
        assert_all_close({}, {}, 1.0)


def test_uninitialised_memory_is_nan() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.ones(3).new_empty(2).isnan().all()
