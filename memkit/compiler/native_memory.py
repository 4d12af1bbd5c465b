"""Memory that calls of emitted C++ leave to later ones: for the system, a fresh page is more work than filling it is for a rule.

Where it sits: below `native_run`.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from math import prod
from threading import RLock

import torch
from torch import Tensor

LEAST = 1 << 20  # bytes of an array that is worth keeping
MOST = 1 << 29  # bytes that are kept while no array lies in them
PAGE = 1 << 21  # of the large kind


class Spare:
    """Blocks of memory that no array lies in, the longest unused first. An array's block comes back when the last tensor of it is gone."""

    def __init__(self, most: int) -> None:
        self.most, self.blocks, self.lock = most, list[mmap.mmap](), RLock()  # arrays may go while a block is being looked for

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An array to be written, in spare memory where there is some that is not much too large."""
        count = prod(shape)
        size = count * dtype.itemsize
        block = self._taken(size + PAGE) or _fresh(size + PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        array = (ctypes.c_char * size).from_buffer(block, -address % PAGE)
        weakref.finalize(array, self.give, block)
        return torch.frombuffer(array, dtype=dtype, count=count).view(*shape)

    def _taken(self, size: int) -> mmap.mmap | None:
        with self.lock:
            fitting = [b for b in self.blocks if size <= len(b) < 2 * size]
            if not fitting:
                return None
            block = min(fitting, key=len)
            self.blocks.remove(block)
            return block

    def give(self, block: mmap.mmap) -> None:
        """Keep a block for later arrays; the longest unused ones go where that is too much."""
        with self.lock:
            self.blocks.append(block)
            while sum(map(len, self.blocks)) > self.most:
                self.blocks.pop(0)


def _fresh(size: int) -> mmap.mmap:
    """Memory from the system, in large pages where it has some."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            block.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return block  # a system without large pages: nothing depends on them
    return block


SPARE = Spare(MOST)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An array to be written, of the dtype of `like`: in spare memory if it is large, and no stand-in of a trace."""
    if type(like) is not Tensor or prod(shape) * like.element_size() < LEAST:
        return like.new_empty(shape)
    return SPARE.empty(shape, like.dtype)
