"""Every preset says where it comes from, computes what its name promises, and starts from gates with which its memory learns."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from memkit.specs.errors import SpecError
from memkit.specs.gate import Number
from memkit.specs.io import PRESETS as FOLDER
from memkit.specs.io import dump_yaml, load_text
from memkit.specs.layer import LayerSpec
from memkit.specs.reference import ReferenceRule
from tests.cases import PRESETS, spec_of, unit

# What a name promises: features, memory, bias, window, retention, optimizer, grad_at.
PROMISED = {
    "linear_attention": "identity linear dot 1 none gd token",
    "retnet": "identity linear dot 1 scalar gd token",
    "gla": "identity linear dot 1 channel gd token",
    "swla": "identity linear dot 8 scalar gd token",
    "dla": "identity mlp dot 1 scalar gd chunk",
    "deltanet": "identity linear l2 1 none gd token",
    "gated_deltanet": "identity linear l2 1 scalar gd decayed",
    "kda": "identity linear l2 1 channel gd decayed",
    "titans": "identity mlp l2 1 scalar momentum chunk",
    "titans_linear": "identity linear l2 1 scalar momentum token",
    "omeganet": "polynomial mlp l2 8 scalar gd chunk",
    "atlas": "polynomial mlp l2 8 scalar muon chunk",
    "atlas_plus": "polynomial gated_mlp l2 8 scalar muon chunk",
    "exp_attention": "exponential linear dot 1 none gd token",
    "deep_transformer": "exponential mlp dot 1 none gd chunk",
    "swdt": "exponential mlp dot 8 scalar gd chunk",
    "dot": "exponential mlp l2 8 none gd chunk",
    "dot_linear": "exponential linear l2 8 none gd token",
    "ttt_linear": "identity linear l2 1 none gd chunk",
    "ttt_mlp": "identity mlp l2 1 none gd chunk",
}
EXPONENTIAL = [n for n, p in PROMISED.items() if p.startswith("exponential")]
HEADER = "# yaml-language-server: $schema=../layer.schema.json\n"


def test_these_presets_ship() -> None:
    assert set(PRESETS) == set(PROMISED)


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_names_its_schema_its_paper_and_its_deviations(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    spec = spec_of(name)
    assert text.startswith(HEADER + f"name: {name}\n")
    assert spec.name == name
    assert re.search(r"arXiv \d{4}\.\d{5}", spec.source), "no arXiv number"
    assert re.search(r"\beqs?\. \d|\bsection \d", spec.source), "no equation number"
    assert re.search(r"^Deviations: ", spec.source, re.MULTILINE), "no deviations"
    assert "source:" in text, "a preset that extends another has its own source"


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_keeps_its_promise(name: str) -> None:
    s = spec_of(name)
    kinds = (s.features.kind, s.memory.kind, s.bias.kind, s.window.size, s.retention.kind, s.optimizer.kind, s.update.grad_at)
    assert " ".join(map(str, kinds)) == PROMISED[name]
    assert s.update.read == "after"


@pytest.mark.parametrize("name", PRESETS)
def test_deep_memories_freeze_the_gradient_for_a_chunk(name: str) -> None:
    spec = spec_of(name)
    deep = len(spec.memory.shapes(8, 8)) > 1
    assert (spec.update.grad_at == "chunk") == (deep or name == "ttt_linear")


@pytest.mark.parametrize("name", [n for n, p in PROMISED.items() if " linear " in p and n not in ("titans_linear", "ttt_linear")])
def test_published_recurrences_without_a_learned_start_begin_at_zero(name: str) -> None:
    weights = ReferenceRule(spec_of(name), 4, 4).init_weights(2)
    assert not any(w.any() for w in weights.values())


@pytest.mark.parametrize("name", ["linear_attention", "retnet", "gla", "swla", "exp_attention"])
def test_attention_like_presets_write_values_as_they_are(name: str) -> None:
    gate = spec_of(name).roles()["step_size"][1]
    assert isinstance(gate, Number) and gate.value == 1


def test_ttt_has_its_norm_residual_and_mini_batch() -> None:
    for name in ("ttt_linear", "ttt_mlp"):
        spec = spec_of(name)
        assert (spec.memory.norm, spec.memory.residual, spec.update.chunk_size) == ("layer", True, 16)


def test_atlas_is_the_spec_of_the_design() -> None:
    written = {
        "features": {"kind": "polynomial", "degree": 2, "coefficients": "learned"},
        "memory": {"kind": "mlp", "depth": 2, "expansion": 4, "activation": "gelu", "residual": True},
        "bias": "l2",
        "window": {"size": 8, "gate": "input"},
        "retention": {"kind": "scalar", "gate": {"kind": "input", "start": 0.99}},
        "optimizer": {"kind": "muon", "steps": 5, "momentum": "input", "step_size": {"kind": "input", "start": 0.02}},
        "update": {"grad_at": "chunk", "chunk_size": 64},
        "layer": {"heads": 16, "conv": 4, "key_norm": "l2", "output_norm": "rms", "output_gate": True},
    }
    atlas = spec_of("atlas")
    assert spec_of({"name": "atlas", "source": atlas.source, **written}) == atlas


@pytest.mark.parametrize("name", EXPONENTIAL)
def test_infinite_features_name_their_temperature_and_refuse_what_needs_their_width(name: str) -> None:
    assert spec_of(name).layer.key_norm == "l2"
    if name != "swdt":  # its deviations are those of deep_transformer
        assert "temperature" in spec_of(name).source
    for overrides in ({"retention": "channel"}, {"optimizer": "muon"}):
        with pytest.raises(SpecError, match="exponential"):
            spec_of(name, overrides)


@pytest.mark.parametrize("name", PRESETS)
def test_yaml_round_trip(name: str) -> None:
    spec = spec_of(name)
    assert load_text(dump_yaml(spec)) == spec
    assert load_text(dump_yaml(spec, minimal=False)) == spec


def fresh_gates(rule: ReferenceRule, tokens: int) -> dict[str, Tensor]:
    """The gates of a fresh layer: every gate at its start."""
    found = {}
    for name, shape in rule.gates.items():
        role, gate = rule.spec.roles()[name]
        start = getattr(gate, "start", None)
        found[name] = torch.full((1, tokens, 1, *shape), role.start if start is None else start)
    return found


def stream(spec: LayerSpec, tokens: int, pairs: int) -> tuple[ReferenceRule, Tensor, Tensor]:
    """Keys and values [1, T, 1, 16]: `pairs` fixed pairs in turn, keys of unit length that share a direction."""
    rule = ReferenceRule(spec, 16, 16)
    k = unit(torch.randn(pairs, 16) + 0.5 * torch.randn(16))
    v = 0.5 * torch.randn(pairs, 16) + 0.3
    turn = torch.arange(tokens) % pairs
    return rule, k[turn][None, :, None], v[turn][None, :, None]


@pytest.mark.parametrize("name", PRESETS)
def test_a_fresh_memory_learns_and_stays_bounded(name: str) -> None:
    """With the gates of a fresh layer, what is read for a key comes closer to its value: the inner loss falls over 160 tokens."""
    rule, k, v = stream(spec_of(name), tokens=160, pairs=5)
    weights = rule.init_weights(1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y, _ = rule(k, k, v, fresh_gates(rule, 160), weights, check=True)
    early, late = (sum(rule.spec.bias.loss(y[0, t, 0], v[0, t, 0]).item() for t in tokens) / 5 for tokens in (range(5), range(155, 160)))
    assert late < early, f"{name}: inner loss {late:.4f} after 160 tokens, {early:.4f} in the first 5"
