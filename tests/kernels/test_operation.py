"""The operation that torch sees: registered, traceable, deterministic, and honest about where it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import memkit
from memkit.compiler import launch
from memkit.compiler.pipeline import CompiledRule, compile_rule
from memkit.compiler.triton_rule import TritonRule
from memkit.inputs import values_and_gradients
from memkit.specs.errors import KernelError
from tests.cases import draw, small


def rule_of(name: str) -> TritonRule:
    return TritonRule(compile_rule(small(name), 4, 4, backend="torch"), pinned=True)


def test_compiles_without_a_graph_break() -> None:
    rule = rule_of("deltanet")
    x = draw(rule, B=1, T=5, H=1, dtype=torch.float32)

    def run(q, k, v, gates, weights):
        return rule(q, k, v, gates, weights)[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    leaf = x.q.clone().requires_grad_()
    y = compiled(leaf, x.k, x.v, x.gates, x.weights)
    torch.testing.assert_close(y, run(x.q, x.k, x.v, x.gates, x.weights))
    y.sum().backward()
    assert leaf.grad is not None and bool(torch.isfinite(leaf.grad).all())


@pytest.mark.parametrize("name", ["retnet", "titans"])
def test_shapes_are_known_before_a_run(name: str) -> None:
    """The traced result has the shape, type and strides of the real one."""
    rule = rule_of(name)
    x = draw(rule, B=2, T=4, H=1, dtype=torch.float32)
    seen = []
    plain = launch._run
    launch._run = lambda inputs, key, which, sizes: seen.append((inputs, key, which, sizes)) or plain(inputs, key, which, sizes)
    try:
        values_and_gradients(rule, x)
    finally:
        launch._run = plain
    assert len({which for _, _, which, _ in seen}) == 2  # forward that saves, and backward
    for inputs, key, which, sizes in seen:
        real, traced = plain(inputs, key, which, sizes), launch._fake(inputs, key, which, sizes)
        assert [(x.shape, x.dtype, x.stride()) for x in real] == [(x.shape, x.dtype, x.stride()) for x in traced]


def test_twice_the_same() -> None:
    rule = rule_of("titans")
    x = draw(rule, B=1, T=5, H=1, dtype=torch.float32)
    first, second = values_and_gradients(rule, x), values_and_gradients(rule, x)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_no_gradient_no_saved_states() -> None:
    rule = rule_of("dla")
    x = draw(rule, B=1, T=8, H=1, dtype=torch.float32)
    with torch.no_grad():
        y, _ = x.run(rule)
    full, _ = x.leaves().run(rule)
    torch.testing.assert_close(y, full, rtol=1e-5, atol=1e-6)


def test_refusals_name_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="plan span has no kernels"):
        TritonRule(compile_rule(small("exp_attention"), 4, 4, backend="torch"), pinned=True)
    rule = rule_of("retnet")
    x = draw(rule, B=1, T=2, H=1, dtype=torch.float32)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    if not torch.cuda.is_available():
        with pytest.raises(KernelError, match="no CUDA or ROCm device"):
            x.run(rule)
        auto = TritonRule(compile_rule(small("retnet"), 4, 4, backend="torch"), pinned=False)
        x.run(auto)
        assert "no CUDA or ROCm device" in auto.explain()


def test_forward_mode_runs_torch_code() -> None:
    """Kernels would drop a tangent; pinned they refuse, else torch code runs in their place and says so."""
    spec = small("retnet")
    base = compile_rule(spec, 4, 4, backend="torch")
    x = draw(base, B=1, T=3, H=1, dtype=torch.float32)
    along = torch.randn_like(x.v)

    def pushed(rule: CompiledRule) -> torch.Tensor:
        return torch.func.jvp(lambda v: x._replace(v=v).run(rule)[0], (x.v,), (along,))[1]

    with pytest.raises(KernelError, match="differentiates forwards"):
        pushed(rule_of("retnet"))
    auto = TritonRule(compile_rule(spec, 4, 4, backend="torch"), pinned=False)
    torch.testing.assert_close(pushed(auto), pushed(base))
    assert "differentiates forwards" in auto.backend
    x.run(auto)
    assert auto.backend == "triton"


def test_memkit_does_not_import_triton() -> None:
    code = "import sys, memkit; memkit.compile('titans', key_dim=4, value_dim=4); assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert memkit.presets()
