"""Run as a program: C++ on arrays that end where memory ends, then on arrays that begin where it begins. What strays is killed.

python -m tests.native.fences PRESET ..
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from memkit.compiler import native_run
from memkit.inputs import values_and_gradients
from tests.cases import draw
from tests.native.rules import preset

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
kept: list[mmap.mmap] = []


def fenced(shape: Sequence[int], dtype: torch.dtype, at_end: bool) -> Tensor:
    """An array of NaN that touches a page which cannot be read: behind it, or in front of it."""
    size = dtype.itemsize * torch.Size(shape).numel()
    inner = -(-max(size, 1) // PAGE) * PAGE
    whole = mmap.mmap(-1, inner + 2 * PAGE)
    kept.append(whole)
    first = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    for page in (first, first + PAGE + inner):
        assert LIBC.mprotect(page, PAGE, 0) == 0  # no access
    everything = torch.frombuffer(whole, dtype=dtype, offset=PAGE, count=inner // dtype.itemsize).fill_(float("nan"))
    count = size // dtype.itemsize
    return (everything[len(everything) - count :] if at_end else everything[:count]).view(*shape)


def run(name: str, dtype: torch.dtype, at_end: bool) -> None:
    plain_run, plain_empty = native_run.run, native_run.empty
    rule = preset(name)
    inputs = draw(rule, B=1, T=7, H=2, dtype=dtype)
    start = inputs.piece(0, 1).run(rule)[1].detach()
    rest = inputs.piece(1, 7)
    want = values_and_gradients(rule, rest, start)

    def empty(*args):
        return {n: fenced(x.shape, x.dtype, at_end) for n, x in plain_empty(*args).items()}

    def fenced_run(given: list[Tensor], *others) -> list[Tensor]:
        results = plain_run([fenced(x.shape, x.dtype, at_end).copy_(x.detach()) for x in given], *others)
        return [x.clone() for x in results]

    native_run.run, native_run.empty = fenced_run, empty
    try:
        found = values_and_gradients(rule, rest, start)
        rest.run(rule, start)
    finally:
        native_run.run, native_run.empty = plain_run, plain_empty
    for n, x in want.items():
        assert torch.allclose(found[n], x, rtol=1e-5, atol=1e-6), n
    kept.clear()


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(2)
    for preset_name in sys.argv[1:]:
        for dtype in (torch.float64, torch.float32):
            for at_end in (True, False):
                print(preset_name, dtype, "end" if at_end else "begin", flush=True)
                run(preset_name, dtype, at_end)
    print("nothing strayed")
