"""How much memory a run will hold, and a refusal with the number where the device cannot give it."""

from __future__ import annotations

import torch

from memkit.specs.errors import PlanError

from .build import Equations

COPIES = 3  # inputs, their gradients and their chunked layout, each held once


def needed(eq: Equations, tokens: int, heads: int, states: int | None, width: int) -> int:
    """Bytes a run over `tokens` tokens of `heads` heads (batch rows times heads) holds at its end, from below.

    Sequences and outputs; in training also gradients and the states that are kept, `states` of every head (None: no training). Memory
    that is used again from chunk to chunk is left out.
    """
    finite = [eq.sizes[out] * eq.sizes[into] for name, (out, into) in eq.weights.items() if name not in eq.infinite]
    state = sum(finite) * (1 + len(eq.slots))
    token = 2 * eq.sizes["k"] + 2 * eq.sizes["v"] + eq.window
    entries = sum(eq.sizes[eq.weights[n][0]] for n in eq.infinite) * (1 + len(eq.slots)) + (eq.sizes["k"] if eq.infinite else 0)
    total = tokens * (token + entries)
    if states is not None:
        total = tokens * (COPIES * token + entries) + states * state
    return total * heads * width


def available(device: torch.device) -> int | None:
    """Bytes that `device` can still give, None where that cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def check_memory(bytes_needed: int, device: torch.device, what: str) -> None:
    """Refuse a run that cannot fit.

    Raises:
        PlanError: with the bytes needed and the bytes there.
    """
    there = available(device)
    if there is not None and bytes_needed > there:
        raise PlanError(
            f"{what} holds at least {bytes_needed / 2**30:.1f} GiB",
            f"at most the {there / 2**30:.1f} GiB that {device} can still give",
            "a shorter piece with the state carried on, fewer rows, a larger update.chunk_size, or no gradients",
            "rule",
        )
