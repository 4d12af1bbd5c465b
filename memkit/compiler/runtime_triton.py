"""What surrounds emitted kernels: how many programs run, arrays, and pieces of a sequence. Its source is copied into emitted files."""

from __future__ import annotations

import torch

from .runtime import BLOCK, blocks, in_sequence, pieces

SCRATCH = 1 << 30  # bytes that one kernel's programs may keep for themselves


def programs(items, scratch, splits=1):
    """The grid: as many programs as there are items, or as their memory allows; each does several items then."""
    return min(items, max(1, SCRATCH // (4 * max(scratch, 1) * splits)), 1 << 20), splits


def outside(like, dtype, axes, *sizes):
    """An array with these axes whose tokens lie next to each other for all heads: [B, n, t, H, width] in memory."""
    order = [a for a in ("b", "n", "t", "s", "h") if a in axes]
    order += [a for a in axes if a not in order]
    found = torch.empty([sizes[axes.index(a)] for a in order], device=like.device, dtype=dtype)
    return found.permute([order.index(a) for a in axes])


def view_chunks(x, chunks):
    """[B, L, H, ..] -> [n, B, H, L / n, ..] without a copy; `chunks` 0 leaves n away."""
    x = x.unflatten(1, (max(chunks, 1), x.shape[1] // max(chunks, 1))).permute(1, 0, 3, 2, *range(4, x.dim() + 1))
    return x if chunks else x[0]


def view_windows(x, chunks, before):
    """[B, before + L, H, K] -> [n, B, H, before + L / n, K] without a copy: each chunk's tokens and `before` more in front."""
    size = (x.shape[1] - before) // max(chunks, 1)
    x = x.unfold(1, size + before, size).permute(1, 0, 2, 4, 3)
    return x if chunks else x[0]


def run_views(forward, resume, rule, q, k, v, gates, params, state):
    """Run a rule over q, k [B, T, H, K] and v [B, T, H, V], piece by piece, on views of what came in.

    forward, resume: the kernels over whole chunks and over the rest of a begun one. rule: names and sizes (dict RULE).
    state: dict of weights, slots, anchor (name -> [B, H, out, in]), keys, values [B, c - 1, H, width] and position.
    """
    batch, tokens, heads = q.shape[:3]
    before, position = rule["window"] - 1, state["position"]
    keys, values = (torch.cat([state["keys"].to(k), k], 1), torch.cat([state["values"].to(v), v], 1)) if before else (k, v)
    gates = {n: gates[n] for n in rule["gates"]}
    if before:
        gates["window_gate"] = in_sequence(gates["window_gate"], position)
    elif "window_gate" in gates:
        gates["window_gate"] = gates["window_gate"][..., 0]
    carried = [*state["weights"].values(), *(s for own in state["slots"].values() for s in own.values())]
    anchor = list(state["anchor"].values())
    learned = [params[n].expand(batch, heads, *shape) for n, shape in rule["params"].items()]
    outputs = []
    if forward is None:
        bounds = blocks(tokens, position, rule["chunk"], BLOCK)
    else:
        bounds = pieces(tokens, position, rule["chunk"], rule["semantic"])
    for start, stop, chunks in bounds:
        sequences = [view_chunks(q[:, start:stop], chunks)]
        sequences += [view_windows(x[:, start : stop + before], chunks, before) for x in (keys, values)]
        sequences += [view_chunks(g[:, start:stop], chunks) for g in gates.values()]
        if rule["semantic"] and (position + start) % rule["chunk"] == 0:
            anchor = carried[: len(rule["weights"])]
        call = forward if chunks else resume
        assert call is not None
        y, *carried = call(*sequences, *carried, *([] if chunks else anchor), *learned)
        outputs.append(from_views(y, chunks > 0))
        if rule["semantic"] and (position + stop) % rule["chunk"] == 0:
            anchor = carried[: len(rule["weights"])]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return y, pack_views(rule, state, carried, anchor, keys, values, tokens)


def from_views(y, chunked):
    """[n, B, H, C, V] -> [B, n * C, H, V]."""
    y = y if chunked else y[None]
    return y.permute(1, 0, 3, 2, 4).flatten(1, 2)


def pack_views(rule, state, carried, anchor, keys, values, tokens):
    """The state after a call, from the list of weights and slots."""
    names, before = rule["weights"], rule["window"] - 1
    slots = iter(carried[len(names) :])
    return {
        "weights": dict(zip(names, carried)),
        "slots": {n: {s: next(slots) for s in rule["slots"]} for n in names},
        "anchor": dict(zip(names, anchor)) if rule["semantic"] else {},
        "keys": keys[:, tokens:].to(state["keys"]) if before else state["keys"],
        "values": values[:, tokens:].to(state["values"]) if before else state["values"],
        "position": state["position"] + tokens,
    }
