"""The convolution and the norms around a memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from memkit.layers.projection import CausalConv, HeadNorm
from tests.compare import assert_close


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution_equals_conv1d_with_any_tail(width: int, tokens: int) -> None:
    """Values, and gradients from the output and from the tail it leaves, also where T is shorter than the kernel."""
    conv = CausalConv(3, width).double()
    x = torch.randn(2, tokens, 3, dtype=torch.float64, requires_grad=True)
    tail = torch.randn(2, width - 1, 3, dtype=torch.float64, requires_grad=True)
    y, left = conv(x, tail)
    padded = torch.cat([tail, x], 1)
    want = F.conv1d(padded.mT, conv.weight.T[:, None], groups=3).mT
    assert_close(y, want, 1e-12)
    assert torch.equal(left, padded[:, tokens:])
    assert torch.autograd.gradcheck(lambda a, b: conv(a, b), (x, tail))


def test_convolution_cut_anywhere_is_the_same_bit_for_bit() -> None:
    conv, x = CausalConv(5, 4), torch.randn(2, 8, 5)
    whole, last = conv(x, torch.zeros(2, 3, 5))
    for cut in range(1, 8):
        first, tail = conv(x[:, :cut], torch.zeros(2, 3, 5))
        second, tail = conv(x[:, cut:], tail)
        assert torch.equal(torch.cat([first, second], 1), whole) and torch.equal(tail, last)


def test_head_norm() -> None:
    y = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    assert_close(HeadNorm("rms", 4, 5).double()(y), F.rms_norm(y, (5,), eps=1e-6), 1e-12)
    assert_close(HeadNorm("layer", 4, 5).double()(y), F.layer_norm(y, (5,), eps=1e-6), 1e-12)
    assert HeadNorm("rms", 4, 5)(y.bfloat16()).dtype == torch.bfloat16
