"""The mended interpreter computes bfloat16 as hardware does: to nearest, halves to even; and still computes everything else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def sums(x, y, out, product, scanned, n: tl.constexpr):
    i = tl.arange(0, n)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + b)
    square = a[:, None] * b[None, :]
    tl.store(product + i[:, None] * n + i[None, :], tl.dot(square, tl.trans(square)))
    tl.store(scanned + i, tl.cumprod(a.to(tl.float32), 0))


@triton.jit
def rounded(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


def test_bfloat16_sums_products_and_scans() -> None:
    n = 16
    x, y = torch.randn(n, dtype=torch.bfloat16), torch.randn(n, dtype=torch.bfloat16)
    out, product, scanned = torch.empty_like(x), torch.empty(n, n), torch.empty(n)
    sums[(1,)](x, y, out, product, scanned, n=n)  # type: ignore[arg-type]
    assert torch.equal(out, x + y)
    wide = (x[:, None] * y[None, :]).float()
    torch.testing.assert_close(product, wide @ wide.T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scanned, x.float().cumprod(0), rtol=1e-6, atol=0)


def test_casts_round_to_nearest_even() -> None:
    x = torch.cat([torch.randn(1022), torch.tensor([1.00390625, 1.01171875])])  # the last two lie halfway between neighbours
    out = torch.empty(1024, dtype=torch.bfloat16)
    rounded[(1,)](x, out, n=1024)  # type: ignore[arg-type]
    assert torch.equal(out, x.bfloat16())
