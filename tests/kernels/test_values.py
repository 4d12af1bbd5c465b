"""Kernels against the token loop: values, final states and every gradient, at awkward widths and lengths.

With MEMKIT_DEEP=1 the presets with a Newton-Schulz step a token take part everywhere, which is slow in the interpreter.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from statistics import median

import pytest
import torch

from memkit.compiler.pipeline import compile_rule
from memkit.compiler.triton_rule import PLANS, TritonRule, refusal
from memkit.inputs import values_and_gradients
from memkit.specs.layer import LayerSpec
from memkit.specs.reference import ReferenceRule
from tests import laws
from tests.cases import PRESETS, draw, small, spec_of
from tests.compare import assert_all_close

K, V = 5, 5


def kernels(spec: LayerSpec, key_dim: int, value_dim: int) -> TritonRule:
    return TritonRule(compile_rule(spec, key_dim, value_dim, backend="torch"), pinned=True)


SPECS = {name: small(name) for name in PRESETS}
COVERED = tuple(n for n, s in SPECS.items() if compile_rule(s, K, V, backend="torch").plan in PLANS)
DEEP = ("atlas", "atlas_plus")  # a Newton-Schulz step a token: one head is enough
TRIED = COVERED if os.environ.get("MEMKIT_DEEP") == "1" else tuple(n for n in COVERED if n not in DEEP)


def exact(spec: LayerSpec, T: int, prefix: int = 0, key_dim: int = K, value_dim: int = V, heads: int = 1) -> None:
    """In float64 no rounding hides a wrong term."""
    rule, oracle = kernels(spec, key_dim, value_dim), ReferenceRule(spec, key_dim, value_dim)
    drawn = draw(oracle, B=1, T=prefix + T, H=heads)
    start = laws.started(oracle, drawn, prefix)
    got, want = (values_and_gradients(r, drawn.piece(prefix, prefix + T), start) for r in (rule, oracle))
    assert_all_close(got, want, 1e-9, f"{spec.name}, T={T}, after {prefix}")


@pytest.mark.parametrize("T", [1, 3, 4, 5])
@pytest.mark.parametrize("name", TRIED)
def test_every_gradient_about_a_chunk(name: str, T: int) -> None:
    exact(SPECS[name], T, heads=2 if T == 5 and name not in DEEP else 1)


@pytest.mark.parametrize("name", DEEP)
def test_orthogonal_every_gradient(name: str) -> None:
    exact(SPECS[name], 5)


@pytest.mark.parametrize("name", TRIED)
def test_resumed(name: str) -> None:
    """From the state after 2 tokens: inside a chunk and inside a window."""
    exact(SPECS[name], 3, prefix=2)


def precise(spec: LayerSpec, dtype: torch.dtype, T: int) -> None:
    """No further from the float64 oracle than the oracle in the same type, times two, and two roundings: only few entries are compared.

    As in `laws.check_precision`, further draws are added where that does not hold of one, and the medians over all of them compared.
    """
    rule, oracle = kernels(spec, K, V), ReferenceRule(spec, K, V)
    own, same = defaultdict(list), defaultdict(list)
    far: dict[str, tuple[float, float]] = {}
    for seed in range(laws.DRAWS):
        narrow = draw(oracle, B=1, H=1, T=T, dtype=dtype, seed=seed)
        best = values_and_gradients(oracle, narrow.map(torch.Tensor.double))
        for found, one in ((own, rule), (same, oracle)):
            for name, error in laws.errors(one, narrow, best).items():
                assert error == error, f"{name} is not a number"
                found[name].append(error)
        pairs = {name: (median(own[name]), median(same[name])) for name in own}
        far = {name: pair for name, pair in pairs.items() if pair[0] > 2 * pair[1] + 2 * torch.finfo(dtype).eps}
        if not far:
            return
    raise AssertionError(f"{spec.name}, {dtype}: (error, the oracle's error) {far}")


@pytest.mark.parametrize("name", TRIED)
def test_float32_over_many_chunks(name: str) -> None:
    precise(small(name, chunk=16), torch.float32, 77)


@pytest.mark.parametrize("name", TRIED)
def test_bfloat16(name: str) -> None:
    precise(SPECS[name], torch.bfloat16, 9)


def test_orthogonal_bfloat16() -> None:
    """A rounding to bfloat16 inside Newton-Schulz makes errors as large as the gradient."""
    precise(SPECS["atlas"], torch.bfloat16, 4)


WIDTHS = {
    "keys and values differ": ("gated_deltanet", {}, 7, 18),
    "momentum and a window": ("titans_linear", {"window": {"size": 3, "gate": "input"}}, 5, 4),
    "a window longer than the chunk": ("omeganet", {"window.size": 6}, 4, 4),
    "a formula for the bias": ("titans", {"bias": {"kind": "expression", "formula": "log(cosh(r))"}}, 4, 4),
    "a power for the bias": ("dla", {"bias": {"kind": "lq", "q": 4}}, 4, 4),
    "huber": ("titans", {"bias": "huber"}, 4, 4),
    "elementwise features": ("dla", {"features": {"kind": "elementwise"}}, 4, 4),
    "read before": ("titans", {"update.read": "before"}, 4, 4),
    "a chain with a norm": ("ttt_linear", {"retention": "scalar"}, 4, 4),
}


@pytest.mark.parametrize("case", WIDTHS)
def test_other_specs(case: str) -> None:
    name, overrides, key_dim, value_dim = WIDTHS[case]
    exact(spec_of(SPECS[name], overrides), 5, key_dim=key_dim, value_dim=value_dim)


def test_tiles_do_not_change_results() -> None:
    """Several tiles along every axis: rows, columns, sums and vectors."""
    from memkit.compiler import triton_rule
    from memkit.compiler.kernels.settings import Configs
    from memkit.compiler.kernels.tile import Config

    spec = spec_of(SPECS["titans"], {"memory.expansion": 5})
    before, small_tiles = triton_rule.configs_for, Config(rows=16, cols=16, inner=16, line=16)
    triton_rule.configs_for = lambda *_: Configs(small_tiles, small_tiles)
    try:
        exact(spec, 5, key_dim=18, value_dim=18)
        exact(SPECS["gated_deltanet"], 20, key_dim=18, value_dim=34)
    finally:
        triton_rule.configs_for = before


@pytest.mark.parametrize("name", ["gated_deltanet", "omeganet"])
def test_parts_do_not_change_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long kernels in parts of few steps, for one item at a time, with scratch that only 64 bits reach."""
    from memkit.compiler import runtime_triton
    from memkit.compiler.kernels import text

    for where, limit, value in ((text, "STEPS", 3), (text, "FAR", 64), (runtime_triton, "SCRATCH", 1)):
        monkeypatch.setattr(where, limit, value)
    rule = kernels(SPECS[name], 6, 6)
    assert "part 2 of" in rule.source and re.search(r"mine \+ \(\d+ \+ zero64", rule.source) and "SCRATCH = 1 " in rule.source
    for kernel in rule.source.split("@triton.jit")[1:]:
        assert "along n" in kernel or len(re.findall(r"^ +# .*\]$", kernel, re.M)) <= 3
    exact(SPECS[name], 6, prefix=2, key_dim=6, value_dim=6, heads=2)  # the rest of a chunk, and a chunk


@pytest.mark.parametrize("name", DEEP)
def test_no_kernel_is_longer_than_registers_allow(name: str) -> None:
    from memkit.compiler.kernels.text import STEPS

    rule = kernels(SPECS[name], K, V)
    assert all(len(re.findall(r"^ +# .*\]$", kernel, re.M)) <= STEPS for kernel in rule.source.split("@triton.jit")[1:])


def test_values_that_offsets_do_not_reach_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under orthogonal a value has a matrix for every token."""
    from memkit.compiler import triton_rule

    deep, flat = (compile_rule(SPECS[name], K, V, backend="torch").compiled for name in ("atlas", "titans"))
    assert refusal(deep) is None
    monkeypatch.setattr(triton_rule, "FAR", 64)
    assert "for each of 4 tokens" in (refusal(deep) or "") and refusal(flat) is None


def test_the_text_says_what_kernels_make() -> None:
    source = kernels(SPECS["titans"], K, V).source
    assert "the loop over n that carries W1, W2, S_W1, S_W2." in source
    backward = source.partition("def chunks_backward(")[2].splitlines()[1]
    resume = source.partition("def resume(")[2].splitlines()[1]
    assert "Gradients of q, keys, values" in backward and "anchor_* is the memory at its start. y, W1" in resume
