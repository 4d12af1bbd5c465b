"""Kernels touch nothing but their own arrays: every array lies between bands of NaN that stay as they were and are never read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.compiler.pipeline import compile_rule
from memkit.compiler.triton_rule import TritonRule
from memkit.inputs import values_and_gradients
from tests.cases import draw, small

BAND = 256  # numbers on each side


class Guarded:
    """Hands out arrays with bands around them, and looks at the bands afterwards."""

    def __init__(self) -> None:
        self.bands: list[Tensor] = []

    def empty(self, *size: Any, device: Any = None, dtype: torch.dtype = torch.float64) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        count = 1
        for length in shape:
            count *= length
        whole = torch.full((count + 2 * BAND,), float("nan"), dtype=dtype)
        self.bands += [whole[:BAND], whole[BAND + count :]]
        return whole[BAND : BAND + count].view(*shape)

    def held(self, x: Tensor) -> Tensor:
        """x with its own strides where they are dense, inside bands."""
        inside = self.empty(x.shape, dtype=x.dtype)
        return inside.copy_(x.detach())

    def check(self) -> None:
        assert self.bands and all(bool(torch.isnan(b).all()) for b in self.bands)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    """Every array of an emitted module, and every input of its functions, between bands."""
    from memkit.compiler import launch

    guard = Guarded()
    plain = launch._run

    def run(inputs: list[Tensor], key: str, name: str, sizes: list[int]) -> list[Tensor]:
        kernels = launch._KNOWN[key]
        names = kernels.names(inputs[0].dtype != torch.bfloat16)
        monkeypatch.setitem(names, "torch", SimpleNamespace(empty=guard.empty, cat=torch.cat))
        return plain([guard.held(x) for x in inputs], key, name, sizes)

    monkeypatch.setattr(launch, "_run", run)
    yield guard
    guard.check()


@pytest.mark.parametrize("name", ["swla", "gated_deltanet", "kda", "titans", "omeganet"])
def test_bands_stay_and_results_are_finite(name: str, guarded: Guarded) -> None:
    rule = TritonRule(compile_rule(small(name), 5, 5, backend="torch"), pinned=True)
    found = values_and_gradients(rule, draw(rule, B=1, T=6, H=1))
    assert all(bool(torch.isfinite(x).all()) for x in found.values())


def test_addresses_of_chunks_and_heads_have_64_bits() -> None:
    """B * T * H * K passes 2^31: what is multiplied by the strides of n, b and h comes from 64-bit numbers."""
    rule = TritonRule(compile_rule(small("titans"), 5, 5, backend="torch"), pinned=True)
    assert "G = groups + zero64" in rule.source and "zero64 = zero.to(tl.int64)" in rule.source
    found = 0
    for kernel in rule.source.split("@triton.jit")[1:]:
        body = re.split(r"^(?:def|class) (?!chunks\w*_\d|resume\w*_\d)", kernel, maxsplit=1, flags=re.M)[
            0
        ]  # functions of torch follow the last
        made = dict(re.findall(r"^ +(\w+) = (.*)$", body, re.M))
        for name, text in made.items():
            if re.fullmatch(r"n(_\d+)?|slot(_after)?(_\d+)?", name):
                nil = re.search(r"nil_\d+", text)
                assert "zero64" in (made[nil[0]] if nil else text), f"{name} = {text}"
                found += 1
    assert found
