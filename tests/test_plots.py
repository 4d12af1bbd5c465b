"""Plots: the coefficients are those of the recurrence, and figures have what they should."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

import memkit
from memkit import plots
from memkit.specs.errors import KernelError, ShapeError, SpecError

pytest.importorskip("matplotlib", reason="matplotlib is not here")


def run_gradients(name: str, overrides: dict[str, Any], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory after each token from the token loop, the same from C) for a loss whose gradient is -v k^T whatever the memory holds."""
    spec = memkit.spec(name, {"bias": "dot", "memory": "linear", "features": "identity", "update.grad_at": "token", **overrides})
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, tokens, 1, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    rule = memkit.reference(spec, key_dim=3, value_dim=3)
    gates = {n: torch.rand(1, tokens, 1, *shape, generator=generator, dtype=torch.float64) for n, shape in rule.gates.items()}
    zero = {"W": torch.zeros(1, 3, 3, dtype=torch.float64)}
    wanted = torch.stack(
        [
            rule(q[:, : t + 1], k[:, : t + 1], v[:, : t + 1], {n: g[:, : t + 1] for n, g in gates.items()}, zero)[1].weights["W"][0, 0]
            for t in range(tokens)
        ]
    )
    found = plots.coefficients(spec, {n: g[0, :, 0] for n, g in gates.items()}, tokens=tokens)["C"]
    own = found[:, found.shape[1] - tokens :]
    return wanted, torch.einsum("ts,sv,sk->tvk", own, v[0, :, 0], k[0, :, 0])


@pytest.mark.parametrize(
    "name, overrides",
    [
        ("retnet", {}),
        ("deltanet", {}),
        ("swla", {}),
        ("swla", {"window.size": 3, "optimizer": "momentum"}),
        ("titans_linear", {}),
        ("omeganet", {}),
        ("titans_linear", {"window": {"size": 4, "gate": "learned"}}),
        ("linear_attention", {"window.size": 5}),
    ],
)
def test_coefficients_are_those_of_the_token_loop(name: str, overrides: dict[str, Any]) -> None:
    wanted, found = run_gradients(name, overrides, 9)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


def test_parts_and_shapes() -> None:
    found = plots.coefficients("omeganet", tokens=10)
    assert found["C"].shape == found["Gamma"].shape == (10, 17)
    assert found["R"].shape == found["M"].shape == (10, 10)
    torch.testing.assert_close(found["C"], found["R"] @ found["M"] @ torch.diag(found["step"]) @ found["Gamma"])
    again = plots.coefficients("omeganet", tokens=10)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert not torch.equal(found["C"], plots.coefficients("omeganet", tokens=10, seed=1)["C"])


def test_shares_of_the_past() -> None:
    shares = plots.weights_of_past("omeganet", tokens=12)
    torch.testing.assert_close(shares.sum(1), torch.ones(12, dtype=torch.float64))
    assert torch.equal(shares, shares.tril())
    forgets = plots.weights_of_past("retnet", {"retain": 0.0}, tokens=5)
    torch.testing.assert_close(forgets, torch.eye(5, dtype=torch.float64))


def test_surprise_is_the_norm_of_the_inner_gradient() -> None:
    layer = memkit.load("deltanet", dim=8, heads=2).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = plots.trace(layer, x, head=1)
    q, k, v, _ = layer.project(x, None)
    first = v[0, 0, 1].norm() * k[0, 0, 1].norm()  # the memory starts at zero
    torch.testing.assert_close(found["surprise"][0], first)
    assert found["surprise"].shape == (6,)
    assert set(found["gates"]) == {"step_size"}


@pytest.mark.parametrize("name", ["atlas", "titans", "gla", "exp_attention", "ttt_mlp"])
def test_figures(name: str, tmp_path: Any) -> None:
    figure = plots.plot_coefficients(name, tokens=8)
    spec = memkit.spec(name)
    panels = 2 + ("momentum" in spec.roles()) + (spec.window.size > 1)
    assert len([axes for axes in figure.axes if axes.get_title()]) == panels
    layer = memkit.load(name, dim=16, heads=2)
    text = plots.plot_text(layer, torch.randn(1, 5, 16), list("ab cd"))
    text.savefig(tmp_path / "text.png")
    assert (tmp_path / "text.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="a gate that deltanet has: step_size"):
        plots.coefficients("deltanet", {"momentum": 0.5})
    with pytest.raises(ShapeError, match="one length"):
        plots.coefficients("titans", {"momentum": torch.ones(3), "retain": torch.ones(4)})
    with pytest.raises(ShapeError, match="one sequence"):
        plots.trace(memkit.load("deltanet", dim=8), torch.zeros(2, 3, 8))
    with pytest.raises(ShapeError, match="0 to 3"):
        plots.trace(memkit.load("deltanet", dim=8), torch.zeros(1, 3, 8), head=4)
    real = builtins.__import__

    def none_of_it(name: str, *args: Any, **rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **rest)

    monkeypatch.setattr(builtins, "__import__", none_of_it)
    with pytest.raises(KernelError, match="pip install matplotlib"):
        plots.plot_coefficients("deltanet")
