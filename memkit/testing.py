"""Checks for your own test suite: two specs are one rule, a compiled rule is its oracle; and hypothesis strategies for specs and runs.

    from memkit import testing

    def test_my_rule_is_the_delta_rule_without_decay():
        testing.assert_equivalent("my_rule.yaml", "deltanet", given={"gates.retain": 1})

`examples/test_my_rule.py` is a whole file of such tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memkit.equivalence import Equivalence, equivalent
from memkit.inputs import Inputs, distance, draw, values_and_gradients
from memkit.specs.errors import MemkitError
from memkit.specs.io import load_spec
from memkit.specs.reference import ReferenceRule

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from memkit.specs.layer import LayerSpec
    from memkit.strategies import Run

__all__ = ["Inputs", "assert_equivalent", "assert_matches_reference", "distance", "draw", "runs", "specs", "values_and_gradients"]

KEY_DIM = VALUE_DIM = 4
TOLERANCE = 1e-9


def assert_equivalent(a: Any, b: Any, *, given: Mapping[str, Any] | None = None, kind: str | None = None) -> Equivalence:
    """Raise AssertionError, with the smallest counterexample, unless the specs are one rule under `given`; see `memkit.equivalent`.

    Args:
        kind: "structural" to insist on a proof.
    """
    found = equivalent(a, b, given=given)
    if not found:
        raise AssertionError(str(found))
    if kind is not None and found.kind != kind:
        raise AssertionError(f"equal, but shown by {found.kind} evidence where {kind} was asked for\n{found}")
    return found


def assert_matches_reference(
    source: Any,
    *,
    overrides: Mapping[str, Any] | None = None,
    key_dim: int = KEY_DIM,
    value_dim: int = VALUE_DIM,
    lengths: Sequence[int] | None = None,
    prefixes: Sequence[int] = (0, 3),
    plan: str = "auto",
    backend: str = "auto",
    tol: float = TOLERANCE,
) -> None:
    """Raise AssertionError unless the compiled rule equals the token loop in float64: outputs, final states and every gradient.

    Args:
        source: preset, path, dict or LayerSpec. key_dim, value_dim: widths; equal for a memory with a residual.
        lengths: tokens of the sequences tried; around the chunk's and the window's edges unless given.
        prefixes: tokens seen before, whose state the sequence starts from; 0 starts from the weights.
    """
    from memkit.compiler.pipeline import compile_rule

    spec = load_spec(source, overrides)
    rule, oracle = compile_rule(spec, key_dim, value_dim, plan=plan, backend=backend), ReferenceRule(spec, key_dim, value_dim)
    for tokens in lengths or edges(spec):
        for prefix in prefixes:
            drawn = draw(oracle, 2, prefix + tokens, 2, seed=tokens)
            start = None if prefix == 0 else drawn.piece(0, prefix).run(oracle)[1].detach()
            got, want = (values_and_gradients(r, drawn.piece(prefix, prefix + tokens), start) for r in (rule, oracle))
            wrong = {n: distance(got[n], want[n]) for n in want if not _same(n, got, want, tol)}
            if wrong:
                rows = "".join(f"\n  {n}: off by {d:.3g}" for n, d in wrong.items())
                after = f" after {prefix} others" if prefix else ""
                raise AssertionError(f"{spec.name} under plan {rule.plan} is not its token loop, {tokens} tokens{after}:{rows}")


def _same(name: str, got: Mapping[str, Any], want: Mapping[str, Any], tol: float) -> bool:
    """Whether one quantity agrees. A window's keys stand twice in a state with a span; only the sum of their gradients has a meaning."""
    if name in ("grad.start.keys", "grad.start.span.keys") and "grad.start.span.keys" in want and want["grad.start.keys"].numel():
        return distance(_key_gradient(got), _key_gradient(want)) <= tol
    return distance(got[name], want[name]) <= tol


def _key_gradient(found: Mapping[str, Any]) -> Any:
    window, span = found["grad.start.keys"], found["grad.start.span.keys"].clone()
    count = min(window.shape[1], span.shape[1])
    span[:, span.shape[1] - count :] += window[:, window.shape[1] - count :]
    return span


def edges(spec: LayerSpec) -> list[int]:
    """Lengths around the edges of the window and, up to 16 tokens, of the chunk; a longer chunk is cut in it."""
    found = {1, 2, spec.window.size, spec.window.size + 1}
    if spec.update.grad_at == "chunk":
        size = spec.update.chunk_size
        found |= {size - 1, size, size + 1, 2 * size + 1} if size <= 16 else {size + 1}
    return sorted(n for n in found if n > 0)


def specs(grad_at: str | None = None, *, finite: bool | None = None) -> SearchStrategy[LayerSpec]:
    """A hypothesis strategy: whole specs of the shipped kinds, with small windows and chunks.

    Args:
        grad_at: token, decayed or chunk; any unless given. finite: features of finite width, or kernels only; any unless given.

    Raises:
        MemkitError: hypothesis is not installed.
    """
    return _strategies().specs(grad_at, finite)


def runs(grad_at: str | None = None, *, finite: bool | None = None) -> SearchStrategy[Run]:
    """A hypothesis strategy: a spec with widths, batch, heads, length and seed, and the inputs they mean: `run.rule()`, `run.inputs()`."""
    return _strategies().runs(grad_at, finite)


def _strategies() -> Any:
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise MemkitError(
            "hypothesis is not installed", "hypothesis, for drawn specs", "pip install hypothesis", "memkit.testing"
        ) from None
    from memkit import strategies

    return strategies
