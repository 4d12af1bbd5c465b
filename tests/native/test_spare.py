"""Memory that one call leaves to the next: nobody's while an array lies in it, and never more than a limit."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memkit.compiler import native_memory
from memkit.compiler.native_memory import LEAST, PAGE, Spare


def test_memory_comes_back_with_the_last_tensor_that_lies_in_it() -> None:
    spare = Spare(1 << 24)
    first = spare.empty((256, 1024), torch.float32)
    view, place = first[3:5].detach(), first.data_ptr()
    del first
    assert not spare.blocks, "a view still lies there"
    other = spare.empty((256, 1024), torch.float32)
    assert other.data_ptr() != place and not other.data_ptr() % PAGE
    view.fill_(1.0)
    del view
    assert len(spare.blocks) == 1
    again = spare.empty((128, 1023), torch.float64)
    assert again.data_ptr() == place and not spare.blocks and again.shape == (128, 1023)


def test_arrays_get_no_memory_much_larger_than_they_are() -> None:
    spare = Spare(1 << 26)
    del (large := [spare.empty((1 << 22,), torch.float64)])[:]
    assert len(spare.blocks) == 1 and not large
    small = spare.empty((1 << 18,), torch.float32)
    assert len(spare.blocks) == 1 and small.numel() == 1 << 18


def test_what_was_unused_longest_goes_first() -> None:
    spare = Spare(4 * (LEAST + PAGE))
    arrays = [spare.empty((LEAST // 4 + i,), torch.float32) for i in range(6)]
    arrays.reverse()
    places = [x.data_ptr() for x in arrays]
    while arrays:
        arrays.pop()
    assert len(spare.blocks) == 3, "the limit is four smaller ones"
    kept = {spare.empty((LEAST // 4 + i,), torch.float32).data_ptr() for i in range(3)}
    assert kept <= set(places[:3])


def test_small_arrays_and_traced_ones_are_torchs() -> None:
    like, before = torch.zeros(1, dtype=torch.float64), list(native_memory.SPARE.blocks)
    small = native_memory.empty([3, 5], like)
    assert small.shape == (3, 5) and small.dtype == torch.float64
    with FakeTensorMode() as mode:
        traced = native_memory.empty([LEAST, 2], mode.from_tensor(like))
    assert traced.shape == (LEAST, 2) and type(traced) is not torch.Tensor
    assert native_memory.SPARE.blocks == before
    large = native_memory.empty([LEAST, 2], like)
    assert large.shape == (LEAST, 2) and large.dtype == torch.float64 and not large.data_ptr() % PAGE
