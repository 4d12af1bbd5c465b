"""Compiled rules under torch's modes and transforms, differentiated twice, and as one file without memkit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memkit.compiler.pipeline import CompiledRule
from tests.cases import PRESETS, Inputs, draw, small
from tests.compare import assert_all_close, assert_close
from tests.compiler.agree import compiled

ONE_OF_EACH_PLAN = ("swla", "titans_linear", "omeganet", "atlas", "dot_linear")
EXACT = 1e-9


def make(name: str, **overrides: Any) -> CompiledRule:
    return compiled(small(name, overrides), 4, 4, tile=3)


def output(rule: CompiledRule):
    """The rule's output as a function of its tensors."""
    return lambda *x: rule(*x)[0]


@pytest.mark.parametrize("name", PRESETS)
def test_the_same_numbers_with_and_without_gradients(name: str) -> None:
    """grad mode (through the autograd.Function), no_grad and inference_mode: equal to the last bit, in float32 too."""
    rule = make(name)
    for dtype in (torch.float64, torch.float32):
        inputs = draw(rule, dtype=dtype)
        y, state = inputs.leaves().run(rule)
        assert y.requires_grad
        with torch.no_grad():
            z, after = inputs.run(rule)
        with torch.inference_mode():
            w, last = inputs.run(rule)
        for got, end in ((z, after), (w, last)):
            assert_close(got, y, 0.0, name)
            tensors = {n: t for n, t in state.state_dict().items() if isinstance(t, Tensor)}
            assert_all_close({n: t for n, t in end.state_dict().items() if isinstance(t, Tensor)}, tensors, 0.0, name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_state_made_in_inference_mode_continues_in_grad_mode(name: str) -> None:
    rule = make(name)
    inputs = draw(rule)
    want, _ = inputs.run(rule)
    with torch.inference_mode():
        _, state = inputs.piece(0, 5).run(rule)
    y, _ = inputs.piece(5, 9).leaves().run(rule, state.clone())
    assert_close(y, want[:, 5:], EXACT, name)
    y.sum().backward()


@pytest.mark.parametrize("name", PRESETS)
def test_autocast_leaves_the_rule_alone(name: str) -> None:
    """Under autocast the inside stays float32; bfloat16 inputs give bfloat16 outputs and a float32 state."""
    rule = make(name)
    inputs = draw(rule, dtype=torch.float32)
    want, _ = inputs.run(rule)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = inputs.run(rule)
        narrow, state = inputs._replace(q=inputs.q.bfloat16(), k=inputs.k.bfloat16(), v=inputs.v.bfloat16()).run(rule)
    assert_close(y, want, 0.0, name)
    assert narrow.dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in state.state_dict().values() if isinstance(t, Tensor))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    rule = make(name)
    whole, again = draw(rule).leaves(), draw(rule).leaves()
    y, _ = whole.run(rule)
    z = checkpoint(lambda q, *_: again._replace(q=q).run(rule)[0], *again.named().values(), use_reentrant=reentrant)
    for result in (y, z):
        (result * result).sum().backward()
    grads = [{n: t.grad for n, t in x.named().items() if t.grad is not None} for x in (whole, again)]
    assert_all_close(*grads, EXACT, f"{name}: gradients")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "backend"), [("titans_linear", "aot_eager"), ("omeganet", "eager"), ("atlas", "eager"), ("dot", "eager")])
def test_torch_compile_takes_the_whole_rule(name: str, backend: str) -> None:
    agrees_when_compiled(name, backend)


def test_torch_compile_takes_a_memory_and_its_slots() -> None:
    overrides: dict[str, Any] = {"bias": "l2", "optimizer": "momentum", "update.grad_at": "decayed"}
    agrees_when_compiled("dot", "eager", **overrides)


@pytest.mark.slow
def test_torch_compile_to_machine_code() -> None:
    agrees_when_compiled("linear_attention", "inductor", tokens=3)


def agrees_when_compiled(name: str, backend: str, tokens: int = 9, **overrides: Any) -> None:
    rule = make(name, **overrides)
    torch._dynamo.reset()
    fast = torch.compile(rule.__call__, fullgraph=True, backend=backend)
    inputs = draw(rule, T=tokens)
    whole, split = inputs.leaves(), inputs.leaves()
    (y, state), (z, after) = fast(*whole), split.run(rule)
    assert_close(y, z, EXACT, f"{name}, {backend}")
    for n, t in after.weights.items():
        assert_close(state.weights[n], t, EXACT, f"{name}, {backend}: {n}")
    for result in (y, z):
        (result * result).sum().backward()
    grads = [{n: t.grad for n, t in x.named().items() if t.grad is not None} for x in (whole, split)]
    assert_all_close(*grads, EXACT, f"{name}, {backend}: gradients")  # type: ignore[arg-type]
    if backend != "inductor":  # one compilation there is long enough
        tail, _ = fast(*inputs.piece(0, 5), after.detach())
        assert_close(tail, inputs.piece(0, 5).run(rule, after.detach())[0], EXACT, f"{name}, {backend}: from a state")


class Exported(nn.Module):
    def __init__(self, rule: CompiledRule) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gates: dict, weights: dict, params: dict) -> Tensor:
        return self.rule(q, k, v, gates, weights, params)[0]


@pytest.mark.parametrize("name", ("swla", "gated_deltanet", "titans", "dot_linear"))
def test_export(name: str) -> None:
    rule = make(name)
    inputs, other = draw(rule), draw(rule, seed=1)
    program = torch.export.export(Exported(rule), tuple(inputs))
    assert_close(program.module()(*other), other.run(rule)[0], EXACT, name)


def regrouped(named: Mapping[str, Tensor]) -> Inputs:
    """Inputs from what `Inputs.named` gives."""
    groups = [{n.split(".", 1)[1]: t for n, t in named.items() if n.startswith(g)} for g in ("gates.", "weights.", "params.")]
    return Inputs(named["q"], named["k"], named["v"], *groups)


def stacked(rule: CompiledRule) -> tuple[Inputs, list[Inputs]]:
    """Three independent inputs, and the three stacked along a new first axis."""
    each = [draw(rule, B=1, T=5, seed=s) for s in range(3)]
    return regrouped({n: torch.stack([x.named()[n] for x in each]) for n in each[0].named()}), each


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_vmap(name: str) -> None:
    rule = make(name)
    batch, each = stacked(rule)
    y = torch.func.vmap(output(rule))(*batch)
    for i, one in enumerate(each):
        assert_close(y[i], one.run(rule)[0], EXACT, f"{name}, row {i}")


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_functional_gradients(name: str) -> None:
    """torch.func.grad equals backward, also one a row under vmap; jacrev, whose backward is itself differentiable, agrees too."""
    rule = make(name)
    batch, each = stacked(rule)

    def loss(k: Tensor, x: Inputs) -> Tensor:
        return (x._replace(k=k).run(rule)[0] ** 2).sum()

    wanted = []
    for one in each:
        leaves = one.leaves()
        (leaves.run(rule)[0] ** 2).sum().backward()
        assert leaves.k.grad is not None
        wanted.append(leaves.k.grad)
        assert_close(torch.func.grad(loss)(one.k, one), leaves.k.grad, EXACT, name)
    many = torch.func.vmap(lambda k, *x: torch.func.grad(loss)(k, Inputs(*x)))(batch.k, *batch)
    assert_close(many, torch.stack(wanted), EXACT, f"{name}, vmap")
    y = each[0].run(rule)[0]
    jacobian = torch.func.jacrev(lambda k: each[0]._replace(k=k).run(rule)[0])(each[0].k)
    assert_close(torch.einsum("bthv,bthvcsgk->csgk", 2 * y, jacobian), wanted[0], EXACT, f"{name}, jacrev")


SIMPLER = {"memory": "linear", "features": "identity", "optimizer.steps": 1}
TINY = {"swla": {}, "titans_linear": {}, "titans": {"memory.expansion": 1}, "atlas": SIMPLER, "dot_linear": {}}


@pytest.mark.parametrize("name", TINY)
def test_gradients_against_differences_twice(name: str) -> None:
    """gradcheck and gradgradcheck: derivatives against finite differences, in every input, from outputs and final memory."""
    rule = compiled(small(name, TINY[name], chunk=2, window=2), 2, 2, tile=2)
    inputs = draw(rule, B=1, T=3, H=1)
    names = list(inputs.named())

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        y, state = regrouped(dict(zip(names, tensors))).run(rule)
        return y, *state.weights.values()

    tensors = tuple(t.requires_grad_() for t in inputs.named().values())
    torch.autograd.gradcheck(outputs, tensors, fast_mode=True)
    torch.autograd.gradgradcheck(outputs, tensors, fast_mode=True)


def test_gradients_differentiated_twice_are_those_of_the_source() -> None:
    """The emitted backward and the one that can be differentiated again give the same first gradient."""
    rule = make("titans")
    inputs = draw(rule).leaves()
    y, _ = inputs.run(rule)
    once = torch.autograd.grad((y * y).sum(), list(inputs.named().values()), retain_graph=True, allow_unused=True)
    again = torch.autograd.grad((y * y).sum(), list(inputs.named().values()), create_graph=True, allow_unused=True)
    pairs = {n: (a, b) for n, a, b in zip(inputs.named(), once, again) if a is not None}
    assert_all_close({n: b for n, (_, b) in pairs.items()}, {n: a for n, (a, _) in pairs.items()}, EXACT)


ALONE = """
import importlib.abc, pathlib, sys, torch
class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "memkit":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
folder = pathlib.Path(sys.argv[1])
found = {}
for name, (call, weights, leaves) in torch.load(folder / "given.pt").items():
    namespace = {"__name__": name}
    exec(compile((folder / f"{name}.py").read_text(), f"{name}.py", "exec"), namespace)
    leaves = [t.requires_grad_() for t in leaves]
    state = namespace["start"](weights, call["q"], call["v"])
    y, state = namespace["run"](**call, state=state)
    found[name] = [y.detach(), *torch.autograd.grad((y * y).sum(), leaves)]
assert "memkit" not in sys.modules
torch.save(found, folder / "found.pt")
"""


def test_emitted_files_run_without_memkit(tmp_path: Path) -> None:
    """The source alone, in a process that cannot import memkit, gives the rule's outputs and gradients."""
    given, wanted = {}, {}
    for name in ONE_OF_EACH_PLAN:
        rule = make(name)
        (tmp_path / f"{name}.py").write_text(rule.source)
        inputs = draw(rule)
        call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "gates": inputs.gates, "params": inputs.params}
        given[name] = (call, inputs.weights, [inputs.q, inputs.k, inputs.v, *inputs.gates.values()])
        leaves = inputs.leaves()
        y, _ = leaves.run(rule)
        wanted[name] = [y, *torch.autograd.grad((y * y).sum(), [leaves.q, leaves.k, leaves.v, *leaves.gates.values()])]
    torch.save(given, tmp_path / "given.pt")
    done = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    for name, tensors in torch.load(tmp_path / "found.pt").items():
        assert len(tensors) == len(wanted[name])
        for i, (got, want) in enumerate(zip(tensors, wanted[name])):
            assert_close(got, want, EXACT, f"{name}: tensor {i}")


def test_tracebacks_point_into_the_source() -> None:
    rule = make("titans")
    inputs, chunks = draw(rule), rule._module["chunks"]
    with pytest.raises(RuntimeError) as error:
        chunks(*[inputs.q] * chunks.__code__.co_argcount)
    last = error.traceback[-1]
    assert "memkit titans" in str(last.path)
    assert rule.source.splitlines()[last.lineno].strip() in str(last.statement)
