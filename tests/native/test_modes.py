"""C++ under torch's modes and transforms, differentiated twice, copied, and in a layer that learns."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.compiler import native_run
from memkit.compiler.native_rule import NativeRule
from memkit.compiler.pipeline import CompiledRule
from tests.cases import draw, small
from tests.compare import assert_all_close, assert_close
from tests.compiler.agree import compiled
from tests.compiler.test_modes import EXACT, Exported, stacked

from .rules import COVERED, ONE_OF_EACH_PLAN, preset


def plain(name: str) -> CompiledRule:
    """The same rule in torch."""
    return compiled(small(name), 4, 4, 3)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that ran."""
    found: list[str] = []
    run = native_run.run

    def counted(inputs: list[Tensor], key: str, name: str, sizes: list[int]) -> list[Tensor]:
        found.append(name)
        return run(inputs, key, name, sizes)  # type: ignore

    monkeypatch.setattr(native_run, "run", counted)
    return found


def gradients(x) -> dict[str, Tensor]:
    return {n: t.grad for n, t in x.named().items() if t.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    rule = preset(name)
    whole, again = draw(rule).leaves(), draw(rule).leaves()
    y, _ = whole.run(rule)
    z = checkpoint(lambda q, *_: again._replace(q=q).run(rule)[0], *again.named().values(), use_reentrant=reentrant)
    for result in (y, z):
        (result * result).sum().backward()
    assert_all_close(gradients(again), gradients(whole), EXACT, name)


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_torch_compile_takes_the_whole_rule(name: str, calls: list[str]) -> None:
    rule = preset(name)
    torch._dynamo.reset()
    fast = torch.compile(rule.__call__, fullgraph=True, backend="aot_eager")
    inputs = draw(rule)
    whole, split = inputs.leaves(), inputs.leaves()
    y, state = fast(*whole)
    (y * y).sum().backward()
    assert any(c.endswith("_saving") for c in calls) and any(c.endswith("_backward") for c in calls)
    z, after = split.run(rule)
    (z * z).sum().backward()
    assert_close(y, z, EXACT, name)
    assert_all_close(state.weights, after.weights, EXACT, name)
    assert_all_close(gradients(whole), gradients(split), EXACT, name)
    tail, _ = fast(*inputs.piece(0, 5), after.detach())
    assert_close(tail, inputs.piece(0, 5).run(rule, after.detach())[0], EXACT, f"{name}: from a state")


def test_torch_compile_of_a_layer(calls: list[str]) -> None:
    torch._dynamo.reset()
    layer = memkit.load(small("titans"), dim=8, heads=2, backend="native")
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, 8)
    y, _ = fast(x)
    y.sum().backward()
    assert "chunks_saving" in calls and "chunks_backward" in calls
    assert_close(y, layer(x)[0], 1e-6)


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_export(name: str) -> None:
    rule = preset(name)
    inputs, other = draw(rule), draw(rule, seed=1)
    program = torch.export.export(Exported(rule), tuple(inputs))
    assert "memkit.native" in program.graph_module.print_readable(print_output=False)  # inside a subgraph without autocast
    assert_close(program.module()(*other), other.run(rule)[0], EXACT, name)


@pytest.mark.parametrize("name", COVERED)
def test_shapes_are_known_before_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trace expects of a call is what the call gives: shapes, types and strides, with and without gradients, in a short chunk."""
    rule = preset(name)
    seen, run = [], native_run.run

    def noted(inputs: list[Tensor], key: str, which: str, sizes: list[int]) -> list[Tensor]:
        seen.append((inputs, key, which, sizes, run(inputs, key, which, sizes)))  # type: ignore
        return seen[-1][-1]

    monkeypatch.setattr(native_run, "run", noted)
    x = draw(rule, T=7)
    _, state = x.piece(0, 2).run(rule)
    y, _ = x.piece(2, 7).leaves().run(rule, state)
    y.sum().backward()
    assert any("backward" in which for _, _, which, _, _ in seen)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for inputs, key, which, sizes, real in seen:
            fake = native_run.operation()([mode.from_tensor(t) for t in inputs], key, which, sizes)
            assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_transforms_run_torch_code(name: str, calls: list[str]) -> None:
    """vmap, grad, grad a row under vmap, and forward mode: not C++, and the numbers of the torch rule."""
    rule, other = preset(name), plain(name)
    batch, each = stacked(rule)

    def loss(r: CompiledRule):
        return lambda k, *x: (each[0]._replace(k=k).run(r)[0] ** 2).sum()

    y = torch.func.vmap(lambda *x: rule(*x)[0])(*batch)  # type: ignore
    grad = torch.func.grad(loss(rule))(each[0].k)
    rows = torch.func.vmap(torch.func.grad(loss(rule)))(batch.k)
    tangent = torch.func.jvp(loss(rule), (each[0].k,), (each[1].k,))[1]
    with torch.autograd.forward_ad.dual_level():
        k = torch.autograd.forward_ad.make_dual(each[0].k, each[1].k)
        dual = torch.autograd.forward_ad.unpack_dual(loss(rule)(k)).tangent
    assert not calls
    for i, one in enumerate(each):
        assert_close(y[i], one.run(other)[0], EXACT, f"{name}, row {i}")
    assert_close(grad, torch.func.grad(loss(other))(each[0].k), EXACT, name)
    assert_close(rows, torch.func.vmap(torch.func.grad(loss(other)))(batch.k), EXACT, name)
    want = torch.func.jvp(loss(other), (each[0].k,), (each[1].k,))[1]
    assert dual is not None
    assert_close(tangent, want, EXACT, name)
    assert_close(dual, want, EXACT, name)


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_second_derivatives(name: str) -> None:
    """Gradients of a function of all first gradients, for outputs and final memory: those of the torch rule."""
    found = []
    for rule in (preset(name), plain(name)):
        x = draw(rule, B=1, T=6, H=1).leaves()
        leaves = x.named()
        y, state = x.run(rule)
        total = (y * y).sum() + sum((w**3).sum() for w in state.weights.values())
        first = torch.autograd.grad(total, list(leaves.values()), create_graph=True, allow_unused=True)
        once = {n: g for n, g in zip(leaves, first) if g is not None}
        second = torch.autograd.grad(sum((g * g.detach().cos()).sum() for g in once.values()), list(leaves.values()), allow_unused=True)  # type: ignore
        twice = {f"twice {n}": g for n, g in zip(leaves, second) if g is not None}
        found.append({n: g.detach() for n, g in once.items()} | twice)
    assert_all_close(*found, 1e-8, name)  # type: ignore


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_some_gradients_are_not_asked_for(name: str) -> None:
    """Only keys are differentiated, and only the final memory is used."""
    found = []
    for rule in (preset(name), plain(name)):
        x = draw(rule)
        k = x.k.clone().requires_grad_()
        _, state = x._replace(k=k).run(rule)
        found.append(torch.autograd.grad(sum(w.sum() for w in state.weights.values()), k)[0])  # type: ignore
    assert_close(*found, EXACT, name)  # type: ignore


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_a_graph_is_walked_twice(name: str) -> None:
    rule = preset(name)
    x = draw(rule).leaves()
    y, _ = x.run(rule)
    first, second = (torch.autograd.grad(y.sum(), [x.q, x.k], retain_graph=True) for _ in range(2))
    for a, b in zip(first, second):
        assert_close(a, b, 0.0, name)


@pytest.mark.parametrize("name", COVERED)
def test_autocast_leaves_the_rule_alone(name: str) -> None:
    """Under autocast the inside stays float32; bfloat16 inputs give bfloat16 outputs and a float32 state."""
    rule = preset(name)
    inputs = draw(rule, dtype=torch.float32)
    want, _ = inputs.run(rule)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = inputs.run(rule)
        narrow, state = inputs._replace(q=inputs.q.bfloat16(), k=inputs.k.bfloat16(), v=inputs.v.bfloat16()).run(rule)
    assert_close(y, want, 0.0, name)
    assert narrow.dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in state.state_dict().values() if isinstance(t, Tensor))


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_awkward_inputs(name: str, calls: list[str]) -> None:
    """Tensors with gaps, expanded ones, and one tensor given twice."""
    rule, other = preset(name), plain(name)
    x = draw(rule, B=2, T=9, H=2)
    k = torch.stack([x.k, x.k], -1).flatten(-2)[..., ::2]
    q, v = x.q.transpose(1, 2).contiguous().transpose(1, 2), x.v[:, :1].expand(-1, 9, -1, -1)
    given = x._replace(q=q, k=k, v=v)
    assert_close(given.run(rule)[0], given.run(other)[0], EXACT, name)
    same = x._replace(q=x.k, k=x.k)
    leaf = same.k.clone().requires_grad_()
    y, _ = same._replace(q=leaf, k=leaf).run(rule)
    z, _ = same._replace(q=leaf, k=leaf).run(other)
    assert_close(*(torch.autograd.grad((r * r).sum(), leaf)[0] for r in (y, z)), EXACT, name)  # type: ignore
    assert calls


@pytest.mark.parametrize("name", ["titans_linear", "omeganet"])
def test_copies_and_pickles(name: str, calls: list[str]) -> None:
    rule = memkit.compile(small(name), key_dim=4, value_dim=4, backend="native")
    layer = memkit.load(small(name), dim=8, heads=2, backend="native").double()
    inputs, x = draw(rule), torch.randn(2, 9, 8, dtype=torch.float64)
    y, z = inputs.run(rule)[0], layer(x)[0]
    for other in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert isinstance(other, NativeRule)
        assert_close(inputs.run(other)[0], y, 0.0, name)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(other.rule, NativeRule)
        assert_close(other(x)[0], z, 0.0, name)


@pytest.mark.parametrize("name", COVERED)
def test_a_layer_learns_as_in_torch(name: str, calls: list[str]) -> None:
    """The same parameters after five steps with a carried state."""
    losses, ends = [], []
    for backend in ("native", "torch"):
        torch.manual_seed(0)
        layer = memkit.load(small(name), dim=8, heads=2, backend=backend).double()
        x, state = torch.randn(3, 30, 8, dtype=torch.float64), None
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for piece in x.split(6, 1):
            y, state = layer(piece, state)
            loss = (y[:, 1:] - piece[:, :-1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = state.detach()
            losses.append(loss.detach())
        ends.append(dict(layer.named_parameters()))
    assert calls
    assert_close(torch.stack(losses[:5]), torch.stack(losses[5:]), 1e-8, name)
    assert_all_close(*ends, 1e-7, name)  # type: ignore
