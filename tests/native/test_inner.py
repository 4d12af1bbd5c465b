"""The sum of two matrices' products entry by entry."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

import memkit
from memkit.compiler import native_build
from memkit.compiler.native_rule import NativeRule
from tests.compare import assert_close

from .rules import preset


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_number_of_rows_and_columns(dtype: torch.dtype) -> None:
    """Matrices in one piece, and with gaps behind their rows, around all widths at which other loops take over."""
    rule = preset("linear_attention")
    inner = native_build.library("inner", rule.native.module.unit("chunks"), dtype).inner
    inner.restype = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}[dtype]
    g = torch.Generator().manual_seed(3)
    for columns in (1, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257):
        for rows, gaps in ((0, (0, 0)), (1, (0, 0)), (5, (0, 0)), (5, (3, 0)), (4, (1, 2))):
            a, b = (torch.randn(rows, columns + gap, generator=g, dtype=torch.float64).to(dtype) for gap in gaps)
            strides = [ctypes.c_long(columns + gap) for gap in gaps]
            found = inner(
                ctypes.c_long(rows), ctypes.c_long(columns),
                ctypes.c_void_p(a.data_ptr()), strides[0], ctypes.c_void_p(b.data_ptr()), strides[1],
            )  # fmt: skip
            wanted = (a[:, :columns].double() * b[:, :columns].double()).sum()
            assert_close(torch.tensor(found, dtype=torch.float64), wanted, tol=1e-12 if dtype is torch.float64 else 2e-5)


@pytest.mark.without_compiler
def test_gradients_of_numbers_a_chunk_are_made_so() -> None:
    """Those of a gate that scales a state: the state's gradient times the state."""
    rule = memkit.compile("titans", key_dim=64, value_dim=64, backend="native")
    assert isinstance(rule, NativeRule)
    text = rule.native.module.functions["chunks_backward"].text
    calls = re.findall(r"= inner\(.*, (\w*grad\w+) \+ .*, (\w*W[12]) \+", text)
    assert {("grad_W1_slots", "W1"), ("grad_S_W1_slots", "S_W1"), ("grad_W2_slots", "S_W2")} <= set(calls), calls
