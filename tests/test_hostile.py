"""Careless and hostile use: what is wrong is refused with a MemkitError that says where, and nothing is silently wrong."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import memkit
from memkit.compiler.pipeline import compile_rule
from memkit.specs.bias import AttentionalBias
from memkit.specs.component import FAMILIES, Component
from memkit.specs.errors import MemkitError, PlanError, ShapeError, SpecError
from memkit.specs.features import FeatureMap
from memkit.specs.memory import Linear, MemoryNet
from memkit.specs.optimizer import InnerOptimizer
from memkit.specs.reference import ReferenceRule
from memkit.specs.retention import Retention
from memkit.specs.state import MemoryState
from tests.cases import draw, small, spec_of
from tests.compare import assert_close
from tests.compiler.agree import check, oracle_results

# ---- specs


@pytest.mark.parametrize("step", ({"activation": ["gelu"]}, {"norm": {"rms": 1}}, {"activation": None}))
def test_a_chain_step_of_any_type(step: Mapping[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"memory\.steps\.0"):
        spec_of({"memory": {"kind": "chain", "steps": [step, {"linear": 1}]}})


@pytest.mark.parametrize("formula", ("sqrt(abs(r))", "abs(r)^0.5", "sqrt(r^2)", "(r^2)^0.5", "sqrt(sqrt(r^2 + 0))"))
def test_a_formula_without_a_slope_at_zero(formula: str) -> None:
    """A zero memory that is asked for a zero value has r = 0, and its inner gradient would be no number."""
    with pytest.raises(SpecError, match="the slope of formula"):
        spec_of({"bias": {"kind": "expression", "formula": formula}})


class Mute:
    """Cannot say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("source", ({"memory": Linear}, {Mute(): 1}, {"memory": Mute()}, {"memory": {"kind": Linear}}))
def test_odd_objects_in_a_dict(source: Any) -> None:
    with pytest.raises(SpecError):
        spec_of(source)


@pytest.mark.parametrize("sizes", ((4, 10**9), (4, 10**400), (10**400, 4), (150_000, 150_000)))
def test_widths_beyond_reason(sizes: tuple[int, int]) -> None:
    """Refused before anything of that size is made."""
    for make in (memkit.compile, memkit.reference):
        with pytest.raises(MemkitError, match="at most"):
            make("deltanet", key_dim=sizes[0], value_dim=sizes[1])


@pytest.mark.parametrize("plan", (["scan"], None, {}, "Scan"))
def test_a_plan_that_is_none(plan: Any) -> None:
    with pytest.raises(PlanError, match="at plan"):
        memkit.compile("deltanet", key_dim=4, value_dim=4, plan=plan)


# ---- rules that leave their memory as it was


@pytest.mark.parametrize(
    "overrides",
    (
        {"optimizer": {"kind": "gd", "step_size": 0}, "retention": "none"},
        {"optimizer": {"kind": "muon", "step_size": 0}, "retention": "none"},
        {"optimizer": {"kind": "momentum", "step_size": 0}, "memory": "mlp", "update.grad_at": "chunk", "update.chunk_size": 3},
        {"window": {"size": 1, "gate": 0}, "retention": {"kind": "scalar", "gate": 1}},
        {"features": "exponential", "memory": "mlp", "window": {"size": 1, "gate": 0}},
    ),
)
def test_a_memory_that_never_moves(overrides: Mapping[str, Any]) -> None:
    spec = spec_of("deltanet", overrides)
    rule, oracle = compile_rule(spec, 3, 3), ReferenceRule(spec, 3, 3)
    for prefix in (0, 2):
        check(rule, oracle_results(oracle, draw(rule, T=prefix + 5), prefix), f"{overrides}")


# ---- tensors and states


def refused(name: str, **changed: Callable[[Tensor], Any]) -> None:
    """The rule and the oracle refuse every tensor of a call, and of a state, that `changed` has spoilt, and name it."""
    spec = small(name)
    for rule in (compile_rule(spec, 4, 4), ReferenceRule(spec, 4, 4)):
        inputs = draw(rule, T=5, dtype=torch.float32)
        _, state = inputs.run(rule)
        for kind, spoilt in changed.items():
            for path, tensor in inputs.named().items():
                if (kind, path) == ("meta", "v"):
                    continue  # all others are then elsewhere
                field, _, key = path.partition(".")
                value = getattr(inputs, field) | {key: spoilt(tensor)} if key else spoilt(tensor)
                with pytest.raises(ShapeError, match=f"at {path}\n"):
                    inputs._replace(**{field: value}).run(rule)
            flat = state.state_dict()
            for path, tensor in flat.items():
                if not isinstance(tensor, Tensor) or not tensor.numel():
                    continue
                marked = state.map(lambda t, own=tensor, fn=spoilt: fn(t) if t is own else t)
                with pytest.raises(ShapeError, match=f"at state.{path}\n"):
                    inputs.run(rule, marked)


@pytest.mark.parametrize("name", ("titans_linear", "atlas", "dot_linear"))
def test_every_tensor_is_looked_at(name: str) -> None:
    """Whole numbers, complex numbers, layouts that are not dense, other devices, other shapes, and what is no tensor."""
    refused(
        name, whole=Tensor.long, complex=lambda t: t.to(torch.complex64), sparse=Tensor.to_sparse, meta=lambda t: t.to("meta"),
        nothing=lambda t: None, array=lambda t: t.numpy(), longer=lambda t: torch.cat([t, t], -1),
    )  # fmt: skip


@pytest.mark.parametrize("name", ("titans_linear", "atlas", "dot_linear"))
def test_every_field_of_a_state_is_looked_at(name: str) -> None:
    rule = compile_rule(small(name), 4, 4)
    inputs = draw(rule, T=4)
    _, good = inputs.run(rule)
    bad: list[dict[str, Any]] = [{"position": p} for p in (-1, 2.5, None, True, torch.tensor(4))]
    bad += [{field: None} for field in ("weights", "slots", "anchor", "keys", "values")]
    bad += [{"slots": {"Z": {}}}, {"anchor": {"Z": good.keys}}, {"span": 3}]
    for fields in bad:
        with pytest.raises(ShapeError, match=r"at state\."):
            inputs.run(rule, good._replace(**fields))
    _, foreign = (lambda r: draw(r, T=4).run(r))(compile_rule(small("gated_deltanet"), 4, 4))
    with pytest.raises(ShapeError, match=r"at state\."):
        inputs.run(rule, foreign)


def test_a_state_dict_of_other_types() -> None:
    rule = compile_rule(small("titans"), 4, 4)
    state: MemoryState = draw(rule, T=3).run(rule)[1]
    flat = state.state_dict()
    for bad in (None, {1: 2}, flat | {"position": 2.5}, flat | {"position": "3"}, flat | {"position": True}, flat | {"keys": 3}):
        with pytest.raises(ShapeError, match="at state"):
            state.load_state_dict(bad)  # type: ignore[arg-type]


def test_a_layer_refuses_odd_inputs() -> None:
    layer = memkit.load("gated_deltanet", dim=8, heads=2)
    x = torch.randn(1, 3, 8)
    _, state = layer(x)
    for bad, old in ((x.to_sparse(), None), (x.long(), None), (None, None), (x, state._replace(conv=None)), (x, state._replace(memory=3))):
        with pytest.raises(ShapeError):
            layer(bad, old)


def test_a_rule_is_copied_and_pickled() -> None:
    rule = compile_rule(small("titans_linear"), 4, 4, plan="scan")
    inputs = draw(rule, T=5)
    for other in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert other.plan == "scan"
        assert torch.equal(inputs.run(other)[0], inputs.run(rule)[0])


def test_shapes_alone() -> None:
    """The meta device: no numbers, the shapes of a real run."""
    layer = memkit.load("titans", dim=8, heads=2).to("meta")
    y, state = layer(torch.empty(2, 5, 8, device="meta"))
    assert y.shape == (2, 5, 8)
    assert state.memory.keys.device.type == "meta"


# ---- components of a third party


@pytest.fixture
def made() -> Iterator[Callable[..., str]]:
    """Defines a kind of a family from its methods; the families are as before when the test ends."""
    before = {root: dict(root.members) for root in FAMILIES.values()}

    def make(root: type[Component], **body: Any) -> str:
        return type("Odd", (root,), {"kind": "odd", "__module__": __name__, "__qualname__": "Odd", **body}).kind

    yield make
    for root, members in before.items():
        root.members.clear()
        root.members.update(members)


def loss(fn: Callable[[Tensor, Tensor], Any]) -> tuple[type[Component], dict[str, Any]]:
    return AttentionalBias, {"loss": lambda self, p, v: fn(p, v)}


def retain(fn: Callable[[Tensor], Any]) -> tuple[type[Component], dict[str, Any]]:
    return Retention, {"retain": lambda self, W, retain=None: fn(W)}


def features(fn: Callable[[Tensor], Any], **more: Any) -> tuple[type[Component], dict[str, Any]]:
    return FeatureMap, {"__call__": lambda self, x: fn(x), **more}


def net(**body: Any) -> tuple[type[Component], dict[str, Any]]:
    return MemoryNet, {"shapes": lambda self, f, v: {"W": (v, f)}, "read": lambda self, W, f, x: W["W"] @ f, **body}


def update(fn: Callable[..., Any], init: Callable[[Tensor], Any] = lambda W: {}) -> tuple[type[Component], dict[str, Any]]:
    return InnerOptimizer, {"init": lambda self, W: init(W), "update": lambda self, grad, state, gates: fn(grad, state, gates)}


def fails(*_: Any) -> Any:
    raise LookupError("no idea")


def unseen(p: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return (p - v).square().sum()


REFUSED: Mapping[str, tuple[tuple[type[Component], dict[str, Any]], str]] = {
    "a loss of an entry each": (loss(lambda p, v: (p - v) ** 2), r"returns a tensor \[3\]"),
    "a loss with an axis": (loss(lambda p, v: (p - v).sum()[None]), r"returns a tensor \[1\]"),
    "a loss that is no tensor": (loss(lambda p, v: None), "returns NoneType"),
    "a loss that raises": (loss(lambda p, v: 1 / 0), "ZeroDivisionError"),
    "a loss without gradients": (loss(unseen), "no_grad"),
    "a loss that branches": (loss(lambda p, v: p.sum() if p.sum() > 0 else v.sum()), "cannot be traced"),
    "a loss by chance": (loss(lambda p, v: (p * torch.rand(3)).sum()), "no random numbers"),
    "features of another width": (features(lambda x: torch.cat([x, x])), r"returns a tensor \[6\]"),
    "features in a list": (features(list), "returns a tensor"),
    "features of no width": (features(lambda x: x, width=lambda self, k: 0), "a width of 0"),
    "another kernel": (features(lambda x: x, kernel=lambda self, a, b: 2 * (a * b).sum()), r"phi\(a\).phi\(b\)"),
    "a kernel with an axis": (features(lambda x: x, kernel=lambda self, a, b: a * b), r"returns a tensor \[3\]"),
    "weights of one axis": (net(shapes=lambda self, f, v: {"W": (v,)}), r"weight W of shape \[\d+\]"),
    "weights of no width": (net(shapes=lambda self, f, v: {"W": (v, 0)}), r"weight W of shape \[\d+, 0\]"),
    "a read of another width": (net(read=lambda self, W, f, x: f.sum()), r"returns a tensor \[\]"),
    "a read of unknown weights": (net(read=lambda self, W, f, x: W["Z"] @ f), "KeyError"),
    "a row is kept": (retain(lambda W: W[0]), r"returns a tensor \[3\]"),
    "a number is kept": (retain(lambda W: W.sum()), r"returns a tensor \[\]"),
    "a transposed memory": (retain(lambda W: W.T), "transposed"),
    "an update that is no pair": (update(lambda g, s, gates: -g), "something else than a pair"),
    "an update of three": (update(lambda g, s, gates: (-g, {}, 1)), "something else than a pair"),
    "an update with a new slot": (update(lambda g, s, gates: (-g, {"Q": g})), "slots"),
    "an update without its slot": (update(lambda g, s, gates: (-g, {}), lambda W: {"S": W * 0}), "slots"),
    "an update by a number": (update(lambda g, s, gates: (g.sum(), {})), r"returns a tensor \[\]"),
    "a transposed update": (update(lambda g, s, gates: (-g.T, {})), "transposed"),
    "an undeclared gate": (update(lambda g, s, gates: (-gates["step_size"] * g, {})), "KeyError"),
    "slots that are no tensors": (update(lambda g, s, gates: (-g, {}), lambda W: [1]), "shaped like W"),
    "slots of another shape": (update(lambda g, s, gates: (-g, {}), lambda W: {"S": W.sum()}), "shaped like W"),
}


# what components say of themselves: (component, what the error says), refused before anything is traced
ANSWERS: Mapping[str, tuple[tuple[type[Component], dict[str, Any]], str]] = {
    "shapes that raise": (net(shapes=fails), "shapes of 'odd': LookupError: no idea"),
    "shapes that are nothing": (net(shapes=lambda self, f, v: None), "shapes of 'odd' returns None"),
    "shapes in a list": (net(shapes=lambda self, f, v: [(v, f)]), "shapes of 'odd' returns list"),
    "no shapes": (net(shapes=lambda self, f, v: {}), "shapes of 'odd' returns no weight"),
    "a shape that is a number": (net(shapes=lambda self, f, v: {"W": v}), r"gives weight W \d+"),
    "a shape of fractions": (net(shapes=lambda self, f, v: {"W": (v, f / 2)}), r"weight W of shape \[\d+, [\d.]+\]"),
    "a weight without a name": (net(shapes=lambda self, f, v: {1: (v, f)}), "shapes of 'odd' returns the name 1"),
    "a weight of two words": (net(shapes=lambda self, f, v: {"W 1": (v, f)}), "shapes of 'odd' returns the name 'W 1'"),
    "scalars that raise": (net(params=fails), "params of 'odd': LookupError: no idea"),
    "scalars that are nothing": (net(params=lambda self, v: None), "params of 'odd' returns None"),
    "a scalar that is a number": (net(params=lambda self, v: {"scale": 1.0}), "params of 'odd' gives scale: 1.0"),
    "a scalar of whole numbers": (net(params=lambda self, v: {"scale": torch.ones(v).int()}), r"scale: a tensor \[3\] of torch.int32"),
    "features whose width raises": (features(lambda x: x, width=fails), "width of 'odd': LookupError: no idea"),
    "features of no known width": (features(lambda x: x, width=lambda self, k: None), "returns a width of None"),
    "features of half a width": (features(lambda x: x, width=lambda self, k: k / 2), "returns a width of 1.5"),
    "features of a true width": (features(lambda x: x, width=lambda self, k: True), "returns a width of True"),
    "features whose scalars raise": (features(lambda x: x, params=fails), "params of 'odd': LookupError: no idea"),
    "features with scalars in a list": (features(lambda x: x, params=lambda self: [1.0]), "params of 'odd' returns list"),
    "slots that raise": (update(lambda g, s, gates: (-g, {}), fails), "init of 'odd': LookupError: no idea"),
    "slots that are nothing": (update(lambda g, s, gates: (-g, {}), lambda W: None), "init of 'odd' returns None"),
    "a slot that is nothing": (update(lambda g, s, gates: (-g, {}), lambda W: {"S": None}), "init of 'odd' gives S: None"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_component_that_cannot_say_what_it_is(made: Callable[..., str], name: str) -> None:
    (root, body), sentence = ANSWERS[name]
    kind = made(root, **body)
    for make in (compile_rule, ReferenceRule):
        with pytest.raises(SpecError, match=sentence) as caught:
            make(spec_of({root.family: kind}), 3, 3)
        assert caught.value.where.startswith(root.family)


@pytest.mark.parametrize(
    ("init", "sentence"),
    (
        (fails, "init of 'odd': LookupError: no idea"),
        (lambda self, shape, generator, dtype: 0.0, "init of 'odd' returns 0.0"),
        (lambda self, shape, generator, dtype: torch.zeros(shape[1:]), r"returns a tensor \[3, 3\] of torch.float32"),
        (lambda self, shape, generator, dtype: torch.zeros(shape).long(), r"returns a tensor \[2, 3, 3\] of torch.int64"),
    ),
)
def test_a_start_that_is_no_weight(made: Callable[..., str], init: Callable[..., Any], sentence: str) -> None:
    root, body = net(init=init)
    spec = spec_of({root.family: made(root, **body)}, {"layer.key_dim": 3, "layer.value_dim": 3})
    with pytest.raises(SpecError, match=sentence):
        compile_rule(spec, 3, 3).init_weights(2)
    with pytest.raises(SpecError, match=sentence):
        memkit.load(spec, dim=6, heads=2)


def test_a_start_of_another_type_is_cast(made: Callable[..., str]) -> None:
    root, body = net(init=lambda self, shape, generator, dtype: torch.ones(shape))
    weights = compile_rule(spec_of({root.family: made(root, **body)}), 3, 3).init_weights(2, dtype=torch.float64)
    assert weights["W"].dtype is torch.float64


@pytest.mark.parametrize("name", REFUSED)
def test_a_component_that_breaks_its_contract(made: Callable[..., str], name: str) -> None:
    (root, body), sentence = REFUSED[name]
    kind = made(root, **body)
    with pytest.raises(SpecError, match=sentence):
        compile_rule(spec_of({root.family: kind}), 3, 3)


def test_what_is_kept_of_a_memory_sees_one_memory(made: Callable[..., str]) -> None:
    """A retention that looks at the whole of W looks at that of its own row and head, in the oracle too."""
    root, body = retain(lambda W: W / (1 + W.norm()))
    spec = spec_of({"retention": made(root, **body)})
    rule, oracle = compile_rule(spec, 3, 3), ReferenceRule(spec, 3, 3)
    inputs = draw(oracle, T=4)
    alone = inputs._replace(q=inputs.q[:1], k=inputs.k[:1], v=inputs.v[:1], gates={n: g[:1] for n, g in inputs.gates.items()})
    assert_close(alone.run(oracle)[0], inputs.run(oracle)[0][:1], 1e-12, "row 0")
    check(rule, oracle_results(oracle, inputs, 0), "norm")


def test_a_shipped_kind_is_not_replaced(made: Callable[..., str]) -> None:
    """A class of the same name from another module is no new edition of it."""
    with pytest.raises(SpecError, match="a second bias called 'l2'"):
        type("L2", (AttentionalBias,), {"kind": "l2", "__module__": "elsewhere", "__qualname__": "L2"})
    assert AttentionalBias.members["l2"].__module__ == "memkit.specs.bias"


@pytest.mark.parametrize("kind", (3, "", "a b", "a: b", "no/path"))
def test_a_kind_is_a_word(made: Callable[..., str], kind: Any) -> None:
    with pytest.raises(SpecError, match="at kind"):
        type("Odd", (AttentionalBias,), {"kind": kind, "__module__": __name__, "__qualname__": "Odd"})
