"""Products of matrices, in every layout and of sizes that are made in different ways."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch
from torch import Tensor

from memkit.compiler import native_build
from tests.compare import assert_close

from .rules import preset

NEAR = [(1, 1, 1), (3, 5, 7), (16, 16, 16), (17, 33, 5), (8, 130, 40), (66, 50, 3), (5, 4, 600)]
FAR = [(16, 1030, 140), (63, 1100, 130), (96, 1024, 129), (97, 1030, 140), (130, 1100, 128), (20, 2145, 61)]  # more than a cache holds
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-13}


def laid(x: Tensor, turned: bool, gap: int) -> tuple[Tensor, Tensor]:
    """A matrix with its first axis in one piece, if turned, or its second; and the gaps behind each piece, which nobody may touch."""
    own = x.T if turned else x
    room = torch.full((own.shape[0], own.shape[1] + gap), torch.nan, dtype=x.dtype)
    room[:, : own.shape[1]] = own
    view = room[:, : own.shape[1]]
    return view.T if turned else view, room[:, own.shape[1] :]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", [*NEAR, *FAR], ids=str)
def test_every_layout(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    library = native_build.library("products", preset("linear_attention").native.module.unit("chunks"), dtype)
    library.product_room.restype = ctypes.c_long
    room = torch.empty(library.product_room(), dtype=dtype)
    (rows, columns, depth), g = sizes, torch.Generator().manual_seed(5)
    a, b, c = (torch.randn(shape, generator=g, dtype=dtype) for shape in ((rows, depth), (depth, columns), (rows, columns)))
    turns = [*product((False, True), repeat=3)] if sizes in NEAR else [(False, False, False), (True, False, False), (True, True, True)]
    for turned, gap, add in product(turns, (0, 3), (0, 1)):
        (x, _), (y, _), (z, behind) = (laid(m, turn, gap) for m, turn in zip((a, b, c), turned, strict=True))
        arrays = [v for m in (x, y, z) for v in (ctypes.c_void_p(m.data_ptr()), *map(ctypes.c_long, m.stride()))]
        library.product(*map(ctypes.c_long, sizes), *arrays, ctypes.c_int(add), ctypes.c_void_p(room.data_ptr()))
        what = f"turned {turned}, gap {gap}, add {add}"
        assert_close(z, a.double() @ b.double() + add * c.double(), TOLERANCES[dtype] * depth**0.5, what)
        assert behind.isnan().all(), f"{what}: written behind the result"
