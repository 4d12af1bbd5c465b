"""What surrounds the emitted functions: pieces of a sequence, layouts, state. Its source is copied into emitted files, so it needs
torch alone."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16  # most tokens whose weights exist at once, where they must
SEGMENT = 1 << 17  # numbers in the largest intermediate of one call; larger ones leave the cache and touch fresh memory


def to_chunks(x: Tensor, chunks: int) -> Tensor:
    """[B, L, H, ..] -> [n, B * H, L / n, ..]; `chunks` 0 leaves the axis n away."""
    batch, length, heads = x.shape[:3]
    rest = x.shape[3:]
    tail = tuple(range(4, 4 + len(rest)))
    x = x.reshape(batch, max(chunks, 1), length // max(chunks, 1), heads, *rest).permute(1, 0, 3, 2, *tail)
    x = x.reshape(x.shape[0], batch * heads, *x.shape[3:])
    return x if chunks else x[0]


def to_windows(past: Tensor, x: Tensor, chunks: int) -> Tensor:
    """past [B, c - 1, H, K], x [B, L, H, K] -> [n, B * H, c - 1 + L / n, K]: each chunk's tokens with the c - 1 tokens in front of them."""
    before, own = past.shape[1], to_chunks(x, max(chunks, 1))
    count, both, size, width = own.shape
    if count > 1 and before > size:
        own = torch.cat([past, x], 1).unfold(1, size + before, size).permute(1, 0, 2, 4, 3)  # [n, B, H, c - 1 + size, K]
        own = own.reshape(count, both, size + before, width)
    elif before:
        parts = [to_chunks(past, 1), own]
        if count > 1:  # the last of the chunk before; a split is cheaper to differentiate than a slice, and than `unfold`
            first, last = own.split([size - before, before], 2)
            parts = [torch.cat([parts[0], last[:-1]]), first, last]
        own = torch.cat(parts, 2)
    return own if chunks else own[0]


def from_chunks(y: Tensor, batch: int, chunked: bool) -> Tensor:
    """[n, B * H, C, V] -> [B, n * C, H, V]."""
    y = y if chunked else y[None]
    count, both, size, width = y.shape
    return y.reshape(count, batch, both // batch, size, width).permute(1, 0, 3, 2, 4).reshape(batch, count * size, both // batch, width)


def blocks(tokens: int, position: int, chunk: int, most: int, several: bool = False) -> list[tuple[int, int, int]]:
    """(start, stop, 0) of each call of at most `most` tokens, none across a chunk's end; several: or of n blocks, (start, stop, n)."""
    found, start = [], 0
    while start < tokens:
        stop = min(tokens, start + chunk - (position + start) % chunk)
        whole = (stop - start) // most if several else 0
        stop = start + whole * most if whole > 1 else min(stop, start + most)
        found.append((start, stop, whole if whole > 1 else 0))
        start = stop
    return found


def pieces(tokens: int, position: int, chunk: int, semantic: bool) -> list[tuple[int, int, int]]:
    """(start, stop, chunks) of each call: the rest of a chunk begun earlier (chunks 0), all whole chunks, then a short last chunk."""
    found, start = [], 0
    begun = position % chunk if semantic else 0
    if begun:
        stop = min(tokens, chunk - begun)
        found.append((0, stop, 0))
        start = stop
    whole = (tokens - start) // chunk
    if whole:
        found.append((start, start + whole * chunk, whole))
        start += whole * chunk
    if start < tokens:
        found.append((start, tokens, 1))
    return found


def cut(x: Tensor, sizes: list[int]) -> list[Tensor]:
    """x [B, L, ..] in pieces of `sizes` tokens. The gradient of a split is a copy, so there is none where one piece is all."""
    return list(x.split(sizes, 1)) if len(sizes) > 1 else [x]


def newest(past: Tensor, x: Tensor) -> Tensor:
    """The last of the tokens past [B, c - 1, ..] and x [B, L, ..], as many as `past` has."""
    before, tokens = past.shape[1], x.shape[1]
    if not before:
        return past
    return x[:, tokens - before :] if before <= tokens else torch.cat([past, x], 1)[:, tokens:]


def run_pieces(forward, resume, rule, q, k, v, gates, params, state, most=None, several=None):
    """Run a rule over q, k [B, T, H, K] and v [B, T, H, V], piece by piece.

    forward, resume: the emitted functions, over whole chunks and over the rest of a begun one. rule: names and sizes (dict RULE).
    state: dict of weights, slots, anchor (name -> [B, H, out, in]), keys, values [B, c - 1, H, width] and position.
    most: tokens of one call where there is no `forward`; None: as many as a cache holds the weights of, all heads together.
    several: `resume` for more than one such block of a chunk.
    Returns y [B, T, H, V] and the state after the last token.
    """
    batch, tokens, heads = q.shape[:3]
    before, position = rule["window"] - 1, state["position"]
    gates = {n: gates[n] for n in rule["gates"]}
    past = [started(state[name], x, position) for name, x in (("keys", k), ("values", v))]
    if before:
        gates["window_gate"] = in_sequence(gates["window_gate"], position)
    elif "window_gate" in gates:
        gates["window_gate"] = gates["window_gate"][..., 0]
    carried = [
        w.reshape(-1, *w.shape[2:]) for w in (*state["weights"].values(), *(s for own in state["slots"].values() for s in own.values()))
    ]
    anchor = [w.reshape(-1, *w.shape[2:]) for w in state["anchor"].values()]
    learned = [
        p.expand(heads, *shape).expand(batch, heads, *shape).reshape(-1, *shape)
        for p, shape in ((params[n], s) for n, s in rule["params"].items())
    ]
    outputs = []
    if forward is None:
        most = most or max(1, min(BLOCK, SEGMENT // (batch * heads * rule["numbers"])))
        bounds = blocks(tokens, position, rule["chunk"], most, several is not None)
    else:
        bounds = pieces(tokens, position, rule["chunk"], rule["semantic"])
    sizes = [stop - start for start, stop, _ in bounds]
    parts = zip(bounds, *(cut(x, sizes) for x in (q, k, v, *gates.values())))
    for (start, stop, chunks), q_part, k_part, v_part, *gate_parts in parts:
        sequences = [to_chunks(q_part, chunks), to_windows(past[0], k_part, chunks), to_windows(past[1], v_part, chunks)]
        sequences += [to_chunks(g, chunks) for g in gate_parts]
        past = [newest(past[0], k_part), newest(past[1], v_part)]
        if rule["semantic"] and (position + start) % rule["chunk"] == 0:
            anchor = carried[: len(rule["weights"])]
        call = (forward or several or resume) if chunks else resume
        y, *carried = call(*sequences, *carried, *(() if call is forward else anchor), *learned)
        outputs.append(from_chunks(y, batch, chunks > 0))
        if rule["semantic"] and (position + stop) % rule["chunk"] == 0:
            anchor = carried[: len(rule["weights"])]
    y = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
    return y, pack(rule, state, carried, anchor, k, v)


def pack(rule, state, carried, anchor, k, v):
    """The state after a call on k [B, T, H, K] and v [B, T, H, V], from the flat list of weights and slots."""
    batch, tokens, heads = k.shape[:3]
    shaped = [w.reshape(batch, heads, *w.shape[1:]) for w in carried]
    names = rule["weights"]
    slots = iter(shaped[len(names) :])
    return {
        "weights": dict(zip(names, shaped)),
        "slots": {n: {s: next(slots) for s in rule["slots"]} for n in names},
        "anchor": {n: a.reshape(batch, heads, *a.shape[1:]) for n, a in zip(names, anchor)} if rule["semantic"] else {},
        "keys": newest(state["keys"], k).clone(),  # no view of what the caller may write to
        "values": newest(state["values"], v).clone(),
        "position": state["position"] + tokens,
    }


def first_state(rule, weights, q, v):
    """The state before the first token: weights name -> [H, out, in], the same for every row; slots and the past empty."""
    (batch, _, heads, width), before, semantic = q.shape, rule["window"] - 1, rule["semantic"]

    def slots(tensors):
        return {n: {s: torch.zeros_like(w) for s in rule["slots"]} for n, w in tensors.items()}

    own = {n: weights[n].expand(batch, *weights[n].shape) for n in rule["weights"]}
    past = {n: v.new_zeros(batch, heads, out, 0) for n, out in rule.get("infinite", {}).items()}
    span = (q.new_zeros(batch, 0, heads, width), past, slots(past), dict(past) if semantic else {}) if past else None
    return {
        "weights": own,
        "slots": slots(own),
        "anchor": dict(own) if semantic else {},
        "keys": q.new_zeros(batch, before, heads, width),
        "values": v.new_zeros(batch, before, *v.shape[2:]),
        "position": 0,
        "span": span,
    }


def started(past: Tensor, x: Tensor, position: int) -> Tensor:
    """past [B, c - 1, ..] in front of x, with the slots before the sequence's start, whose weight is 0, filled by its first token: 0
    times its loss is 0, and so is 0 times its gradient."""
    missing = past.shape[1] - position
    if missing <= 0:
        return past
    if not position:
        return x[:, :1].detach().expand(-1, missing, *x.shape[2:])
    first = past[:, missing : missing + 1].detach()
    return torch.cat([first.expand(-1, missing, *x.shape[2:]), past[:, missing:]], 1)


def in_sequence(gate: Tensor, position: int) -> Tensor:
    """Window gates [B, T, H, c] with the slots that lie before the sequence's start set to 0."""
    tokens, size = gate.shape[1], gate.shape[-1]
    if position >= size - 1:
        return gate
    token = torch.arange(position + 1 - size, position + tokens, device=gate.device)
    return gate.masked_fill((token < 0).unfold(0, size, 1)[:, None, :], 0.0)
