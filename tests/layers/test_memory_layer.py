"""MemoryLayer: state, modes, dtypes, parameters, errors. All presets, small and in float64 where equality is meant."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from memkit.layers.memory_layer import LayerState, MemoryLayer, load
from memkit.specs.errors import KernelError, MemkitError, ShapeError, SpecError
from tests.cases import PRESETS, small
from tests.compare import assert_all_close, assert_close

DIM, HEADS, TOKENS = 8, 2, 9


def layer_of(name: str, **overrides: object) -> MemoryLayer:
    """A small double-precision layer whose window and chunk are crossed within nine tokens."""
    torch.manual_seed(0)
    return MemoryLayer(small(name, overrides), DIM, HEADS).double()


def run_in_pieces(layer: MemoryLayer, x: Tensor, sizes: list[int]) -> tuple[Tensor, LayerState]:
    outputs, state, at = [], None, 0
    for size in sizes:
        y, state = layer(x[:, at : at + size], state)
        outputs.append(y)
        at += size
    assert at == x.shape[1] and state is not None
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("name", PRESETS)
def test_a_cut_sequence_equals_the_uncut_one(name: str) -> None:
    """Token by token, prefill then decode, and a first piece shorter than the convolution, with gradients through the state."""
    layer, x = layer_of(name), torch.randn(3, TOKENS, DIM, dtype=torch.float64)
    whole, last = layer(x)
    grads = torch.autograd.grad((whole * whole).sum() + last.memory.values.sum(), list(layer.parameters()), allow_unused=True)
    for sizes in ([1] * TOKENS, [6, 1, 1, 1], [2, 7]):
        y, state = run_in_pieces(layer, x, sizes)
        assert_close(y, whole, 1e-10, f"{sizes}")
        assert_all_close(_tensors(state), _tensors(last), 1e-10, f"state {sizes}")
    y, state = run_in_pieces(layer, x, [2, 7])
    cut = torch.autograd.grad((y * y).sum() + state.memory.values.sum(), list(layer.parameters()), allow_unused=True)
    for (parameter, _), a, b in zip(layer.named_parameters(), cut, grads):
        assert a is not None and b is not None, f"{parameter} has no gradient"
        assert_close(a, b, 1e-9, parameter)


@pytest.mark.parametrize("name", PRESETS)
def test_modes_give_the_same_numbers(name: str) -> None:
    layer, x = layer_of(name), torch.randn(2, 6, DIM, dtype=torch.float64)
    want, state = layer(x)
    assert want.requires_grad
    layer.eval()
    assert torch.equal(layer(x)[0], want)
    with torch.no_grad():
        y, quiet = layer(x)
    assert torch.equal(y, want) and not y.requires_grad and not any(t.requires_grad for t in _tensors(quiet).values())
    with torch.inference_mode():
        y, carried = layer(x)
        assert torch.equal(y, want)
        decoded, _ = layer(x[:, :1], carried)
    outside, _ = layer(x[:, :1], carried)  # a state made under inference_mode serves outside of it too
    assert torch.equal(outside, decoded)
    assert_close(outside, layer(x[:, :1], state)[0], 1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_the_future_and_other_rows_do_not_matter(name: str) -> None:
    layer, x = layer_of(name), torch.randn(2, 7, DIM, dtype=torch.float64)
    y, _ = layer(x)
    later, other = x.clone(), x.clone()
    later[:, 5:] += 1
    other[1] += 1
    assert_close(layer(later)[0][:, :5], y[:, :5], 1e-12, "a change at token 5")
    assert not torch.allclose(layer(later)[0][:, 5:], y[:, 5:])
    assert_close(layer(other)[0][0], y[0], 1e-12, "a change in row 1")


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_fresh_layer_trains(name: str, amp: bool) -> None:
    """A few steps on: repeat the input of two tokens ago. 50 steps of the presets uncut fall to about a third."""
    torch.manual_seed(0)
    layer = MemoryLayer(small(name), DIM, HEADS)
    x = torch.randn(4, 8, DIM)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y, _ = layer(x)
        assert y.dtype == (torch.bfloat16 if amp else torch.float32)
        loss = (y[:, 2:].float() - x[:, :-2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.isfinite(p).all() for p in layer.parameters())
    assert losses == sorted(losses, reverse=True), losses


@pytest.mark.parametrize("name", PRESETS)
def test_every_part_of_the_state_counts(name: str) -> None:
    """Changing any tensor of a carried state changes what comes next: nothing is carried in vain.

    Infinite features hold all keys seen in their span, so that a plan may take the window's keys from there.
    """
    layer, x = layer_of(name), torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    _, state = layer(x[:, :6])  # inside a chunk of 4 and a window of 3
    want, _ = layer(x[:, 6:], state)
    flat = state.state_dict()
    for entry, value in flat.items():
        if isinstance(value, Tensor) and value.numel() and not (entry == "memory.keys" and state.memory.span is not None):
            y, _ = layer(x[:, 6:], state.load_state_dict({**flat, entry: value + torch.randn_like(value)}))
            assert not torch.equal(y, want), f"{entry} does not reach the output"


def test_state_methods() -> None:
    layer, x = layer_of("atlas"), torch.randn(2, 6, DIM, dtype=torch.float64)
    _, state = layer(x[:, :4])
    want, _ = layer(x[:, 4:], state)
    assert state.nbytes == sum(t.numel() * 8 for t in _tensors(state).values()) > state.memory.nbytes
    assert state.memory.position == 4 and state.state_dict()["memory.position"] == 4
    kept = state.clone()
    state.conv.data.zero_()
    assert torch.equal(layer(x[:, 4:], kept)[0], want)
    file = io.BytesIO()
    torch.save(kept.state_dict(), file)
    file.seek(0)
    back = layer(x[:, :1])[1].load_state_dict(torch.load(file))
    assert torch.equal(layer(x[:, 4:], back)[0], want)
    with pytest.raises(ShapeError, match=r"memory\.position"):
        state.load_state_dict({"conv": state.conv})


def test_truncated_backpropagation_needs_detach() -> None:
    layer, x = layer_of("titans"), torch.randn(1, 8, DIM, dtype=torch.float64)
    y, state = layer(x[:, :4])
    y.sum().backward()
    y, _ = layer(x[:, 4:], state.detach())
    y.sum().backward()
    y, _ = layer(x[:, 4:], state)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_the_start_is_learned_or_zero() -> None:
    deep, plain = layer_of("titans"), layer_of("deltanet")
    assert {name: p.shape[0] for name, p in deep.initial.items()} == {"W1": HEADS, "W2": HEADS}
    assert not list(plain.initial.parameters())
    x = torch.randn(1, 3, DIM, dtype=torch.float64)
    deep(x)[0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in deep.initial.parameters())
    zero = plain.initial_weights(x)["W"]
    assert zero.shape == (HEADS, 4, 4) and zero.dtype == torch.float64 and not zero.any()


def test_learned_scalars_start_where_the_spec_says_and_stay_positive() -> None:
    layer = layer_of("atlas")
    start = layer.scalars()["features.coefficients"]
    assert_close(start, torch.tensor([[1.0, 1.0, 0.5]] * HEADS, dtype=torch.float64), 1e-6)
    with torch.no_grad():
        for p in layer.scalars.parameters():
            p -= 5
    assert (layer.scalars()["features.coefficients"] > 0).all()
    norm = layer_of("ttt_linear").scalars()
    assert sorted(norm) == ["memory.scale", "memory.shift"] and (norm["memory.scale"] == 1).all()


def test_gates_are_float32_and_in_range_under_autocast() -> None:
    layer = MemoryLayer(small("atlas"), DIM, HEADS)
    with torch.autocast("cpu", torch.bfloat16):
        gates = layer.gates(100 * torch.randn(2, 5, DIM).bfloat16())
        q, k, v, _ = layer.project(torch.randn(2, 5, DIM), None)
    assert {name: tuple(g.shape) for name, g in gates.items()} == {name: (2, 5, HEADS, *s) for name, s in layer.rule.gates.items()}
    for name, gate in gates.items():
        assert gate.dtype == torch.float32 and ((gate >= 0) & (gate <= 1)).all(), name
    assert v.dtype == torch.bfloat16
    assert_close(k.norm(dim=-1), torch.ones(2, 5, HEADS), 1e-6, "key norm")


def test_gates_start_where_their_role_says() -> None:
    layer = MemoryLayer(small("atlas"), DIM, HEADS)
    gates = layer.gates(torch.zeros(1, 1, DIM))
    for name, (role, gate) in layer.spec.roles().items():
        start = getattr(gate, "start", None)
        assert_close(gates[name], torch.full_like(gates[name], role.start if start is None else start), 1e-5, name)


def test_copies_and_dtypes() -> None:
    layer = MemoryLayer(small("atlas"), DIM, HEADS)
    x = torch.randn(2, 5, DIM)
    want, _ = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x)[0], want)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], want)
    fresh = MemoryLayer(layer.spec, DIM)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x)[0], want)
    assert_close(copy.deepcopy(layer).double()(x.double())[0], want, 1e-5)
    y, state = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16 and state.memory.weights["W1"].dtype == torch.float32
    assert_close(y, want, 5e-2)


def test_follows_the_convention_of_gru() -> None:
    x = torch.randn(2, 5, DIM)
    for layer in (nn.GRU(DIM, DIM, batch_first=True), MemoryLayer(small("deltanet"), DIM, HEADS)):
        y, state = layer(x)
        y2, _ = layer(x, state)
        assert y.shape == y2.shape == x.shape


def test_widths() -> None:
    layer = load("deltanet", dim=12, heads=3, overrides={"layer.key_dim": 5, "layer.value_dim": 2})
    assert layer(torch.randn(1, 3, 12))[0].shape == (1, 3, 12)
    assert (layer.heads, layer.spec.layer.heads, layer.rule.key_dim, layer.rule.value_dim) == (3, 3, 5, 2)
    assert load("deltanet").dim == 256
    shown = repr(layer)
    assert "deltanet, dim=12, heads=3, key_dim=5, value_dim=2" in shown and "W [2, 5]" in shown


OPTIONS = (
    {"layer.conv": 0},
    {"layer.conv": 1},
    {"layer.output_norm": "none"},
    {"layer.output_norm": "layer"},
    {"layer.output_gate": False},
    {"layer.activation": "none"},
    {"layer.key_norm": "none"},
)


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_options_around_the_memory(option: dict[str, object]) -> None:
    layer, x = layer_of("deltanet", **option), torch.randn(2, 5, DIM, dtype=torch.float64)
    whole, _ = layer(x)
    assert not torch.allclose(whole, layer_of("deltanet")(x)[0])
    assert_close(run_in_pieces(layer, x, [1, 1, 3])[0], whole, 1e-12)


MISFITS = [
    (lambda: torch.zeros(2, 3), "x[None]", r"\[2, 3\]"),
    (lambda: torch.zeros(3, DIM), "x[None] for a batch of one", r"B, T >= 1"),
    (lambda: torch.zeros(1, DIM, 3), "transpose", "D=8 H=2 K=4 V=4"),
    (lambda: torch.zeros(1, 0, DIM), "", r"\[1, 0, 8\]"),
    (lambda: torch.zeros(0, 3, DIM), "", r"\[0, 3, 8\]"),
    (lambda: torch.zeros(1, 3, DIM, dtype=torch.long), "embed", "int64"),
    (lambda: torch.zeros(1, 3, DIM, dtype=torch.float64), "x.to(torch.float32)", "float64"),
    (lambda: None, "", "NoneType"),
]


@pytest.mark.parametrize(("make", "hint", "says"), MISFITS)
def test_an_x_that_does_not_fit(make: object, hint: str, says: str) -> None:
    layer = MemoryLayer(small("deltanet"), DIM, HEADS)
    with pytest.raises(ShapeError, match=says) as error:
        layer(make())  # type: ignore[operator]
    assert error.value.where == "x" and (hint in error.value.hint or hint == "x[None]")


def test_a_state_that_does_not_fit() -> None:
    layer, x = MemoryLayer(small("deltanet"), DIM, HEADS), torch.randn(2, 3, DIM)
    _, state = layer(x)
    with pytest.raises(ShapeError, match=r"state.conv(.|\n)*B=3"):
        layer(torch.randn(3, 1, DIM), state)
    with pytest.raises(ShapeError, match="LayerState"):
        layer(x, state.memory)
    with pytest.raises(ShapeError, match="state"):
        layer(x, MemoryLayer(small("deltanet"), 2 * DIM, 2 * HEADS)(torch.randn(2, 3, 2 * DIM))[1])


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="heads: 2"):
        load("deltanet", dim=10, heads=4)
    for sizes in ({"dim": 0}, {"dim": 8, "heads": 0}, {"dim": 8.0}, {"dim": True}):
        with pytest.raises(ShapeError, match="whole number"):
            load("deltanet", **sizes)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="residual"):
        load("atlas", dim=32, overrides={"layer.key_dim": 3})
    with pytest.raises(KernelError, match="backend"):
        load("deltanet", backend="abacus")
    with pytest.raises(MemkitError):
        load("delta_net")


def test_check_refuses_what_is_not_finite() -> None:
    layer, x = MemoryLayer(small("deltanet"), DIM, HEADS), torch.randn(1, 4, DIM)
    x[0, 2, 0] = float("nan")
    assert not torch.isfinite(layer(x)[0]).all()
    with pytest.raises(ShapeError, match=r"non-finite values, first in .* at batch 0, token 2"):
        layer(x, check=True)


@pytest.mark.parametrize("name", ["gated_deltanet", "titans"])
def test_torch_compile_takes_the_whole_layer(name: str) -> None:
    """Outputs, every gradient, and a second piece from a state; its backward is traced too."""
    torch._dynamo.reset()
    layer, x = layer_of(name), torch.randn(2, 5, DIM, dtype=torch.float64)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for call in (fast, layer):
        y, state = call(x)
        (y * y).sum().backward()
        grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        layer.zero_grad()
        found.append({"y": y, **grads, **_tensors(state)})
    assert_all_close(found[0], found[1], 1e-10, name)
    assert_close(fast(x, state.detach())[0], layer(x, state.detach())[0], 1e-10, f"{name}: from a state")


def _tensors(state: LayerState) -> dict[str, Tensor]:
    return {name: t for name, t in state.state_dict().items() if isinstance(t, Tensor)}


def test_a_layer_takes_what_memkit_load_takes() -> None:
    assert MemoryLayer("deltanet", 16, heads=2).spec == load("deltanet", dim=16, heads=2).spec
    assert MemoryLayer({"extends": "deltanet", "bias": "huber"}, 16).spec.bias.kind == "huber"
    with pytest.raises(SpecError, match="deltanet"):
        MemoryLayer("deltnet", 16)
