"""Delta rules and gated linear attention of others as cases, all pure torch: transformers' chunk form, fla's naive functions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import inputs
from inputs import Timed


def fla(operation: str) -> Any:
    """fla.ops.<operation>.naive, loaded from its file: the functions are pure torch, but the package around them imports Triton."""
    package = importlib.util.find_spec("fla")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("no module named fla")
    path = Path(package.origin).parent / "ops" / operation / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{operation}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def transformers(T: int, H: int, K: int) -> Timed:
    """What transformers' Qwen3-Next runs where no kernel is at hand."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    x = inputs.delta(T, H, K)
    run = lambda q, k, v, g, b: torch_chunk_gated_delta_rule(q, k, v, g=g, beta=b)[0]
    return Timed(run, [x[n] for n in ("q", "k", "v", "log_retain", "step")], x["out"])


def delta_rule(T: int, H: int, K: int) -> Timed:
    """fla.ops.delta_rule.naive, chunkwise; it wants [B, H, T, K]."""
    naive = fla("delta_rule")
    x = inputs.delta(T, H, K)

    def run(q, k, v, step):
        y = naive.delta_rule_chunkwise(*(t.transpose(1, 2).contiguous() for t in (q, k, v, step)))[0]
        return y.transpose(1, 2)

    return Timed(run, [x[n] for n in ("q", "k", "v", "step")], x["out"])


def gated_delta_rule(T: int, H: int, K: int) -> Timed:
    """fla.ops.gated_delta_rule.naive, chunk form."""
    naive = fla("gated_delta_rule")
    x = inputs.delta(T, H, K)
    run = lambda q, k, v, g, b: naive.naive_chunk_gated_delta_rule(q, k, v, g=g, beta=b)[0]
    return Timed(run, [x[n] for n in ("q", "k", "v", "log_retain", "step")], x["out"])


def gla(T: int, H: int, K: int) -> Timed:
    """fla.ops.gla.naive, a loop over tokens: fla has no chunk form of it in pure torch."""
    naive = fla("gla")
    x = inputs.delta(T, H, K, channel=True)
    return Timed(lambda q, k, v, g: naive.naive_recurrent_gla(q, k, v, g)[0], [x[n] for n in ("q", "k", "v", "log_retain")], x["out"])


def simple_gla(T: int, H: int, K: int) -> Timed:
    """fla.ops.simple_gla.naive, chunk form."""
    naive = fla("simple_gla")
    x = inputs.delta(T, H, K)
    return Timed(lambda q, k, v, g: naive.naive_chunk_simple_gla(q, k, v, g)[0], [x[n] for n in ("q", "k", "v", "log_retain")], x["out"])
