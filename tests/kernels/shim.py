"""Mends for triton's interpreter: it computes on the bits of bfloat16 numbers, and checks every integer sum for overflow, which is slow.

Tested in `test_shim.py`; private names of triton are replaced, so the pin of triton and these lines go together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

BF16 = tl.bfloat16
_done: list[bool] = []


def _is_bf16(handle: Any) -> bool:
    if not isinstance(handle, interpreter.TensorHandle) or isinstance(handle.dtype, tl.pointer_type):
        return False
    return handle.dtype.scalar == BF16 and handle.data.dtype == np.uint16


def _widened(handle: Any) -> Any:
    """float32 with the same values; anything else as it is."""
    if not _is_bf16(handle):
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrowed(handle: Any) -> Any:
    """bfloat16, rounded to nearest, halves to even."""
    values = np.ascontiguousarray(handle.data, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return interpreter.TensorHandle(np.asarray(np.where(np.isnan(values), np.uint16(0x7FC0), rounded), dtype=np.uint16), BF16)


def _wrap(name: str, operands: int) -> None:
    plain = getattr(interpreter.InterpreterBuilder, name)

    def mended(self: Any, *args: Any, **options: Any) -> Any:
        if not any(_is_bf16(x) for x in args[:operands]):
            return plain(self, *args, **options)
        out = plain(self, *[_widened(x) for x in args[:operands]], *args[operands:], **options)
        return _narrowed(out) if out.dtype.scalar == tl.float32 else out

    setattr(interpreter.InterpreterBuilder, name, mended)


def _casts() -> None:
    builder: Any = interpreter.InterpreterBuilder
    cast, convert, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def to_bf16(source: Any, target: Any) -> bool:
        return target.scalar == BF16 and isinstance(source, interpreter.TensorHandle) and source.dtype.scalar == tl.float32

    def mended_dot(self: Any, a: Any, b: Any, total: Any, *rest: Any, **options: Any) -> Any:
        out = dot(self, _widened(a), _widened(b), _widened(total), *rest, **options)
        return _narrowed(out) if _is_bf16(total) else out

    builder.cast_impl = lambda self, source, target: _narrowed(source) if to_bf16(source, target) else cast(self, source, target)
    builder.create_fp_to_fp = lambda self, source, target, mode: (
        _narrowed(source) if to_bf16(source, target) else convert(self, source, target, mode)
    )
    builder.create_dot = mended_dot


def install() -> None:
    """Mend the interpreter of this process."""
    if _done:
        return
    _done.append(True)
    _wrap("binary_op", 2)
    for name in ("unary_op", "create_rsqrt", "create_erf"):
        _wrap(name, 1)
    _wrap("create_fma", 3)
    _casts()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
