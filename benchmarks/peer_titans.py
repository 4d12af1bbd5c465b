"""titans-pytorch's NeuralMemory as a case."""

from __future__ import annotations

import torch
from inputs import KEPT, STEP, Timed, bias_of
from titans_pytorch import NeuralMemory


def memory(T: int, d: int, C: int, batched: bool) -> Timed:
    """A two-layer memory of hidden width 2 d with momentum and decay, one head, on x [1, T, d].

    Args:
        batched: gradients at the weights of the chunk's start (batch_size = chunk size), as memkit's titans takes them; else the
            default, in which every gradient is taken at the first weights.
    """
    layer = NeuralMemory(
        dim=d,
        chunk_size=C,
        batch_size=C if batched else None,
        momentum=True,
        mem_model_norm_add_residual=False,
        default_step_transform_max_lr=STEP,
        init_decay_bias=bias_of(1 - KEPT),
        default_model_kwargs={"depth": 2, "expansion_factor": 2.0},
    )
    x, out = torch.randn(1, T, d), torch.randn(1, T, d)
    weights = [w for w in layer.parameters() if w.requires_grad]
    return Timed(lambda x, *_: layer(x)[0], [x, *weights], out)
