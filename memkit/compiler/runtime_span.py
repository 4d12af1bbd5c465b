"""The loop over chunks for weights over infinite features. Its source is copied into emitted files, so it needs torch and `runtime` alone.

The past is a list of blocks (keys, entries, scales): entries [g, h, out] never change, their scales [g, h] follow the decays. Scales are
(own, slot, left): a weight is own * entry + slot * slot entry, a slot is left * slot entry.
"""

from __future__ import annotations

import torch

from memkit.compiler.runtime import from_chunks, in_sequence, newest, pieces, started, to_chunks, to_windows

BLOCK = 512  # columns of the past handled at a time


def run_span(step, history, rule, q, k, v, gates, params, state):
    """Run a rule over q, k [B, T, H, K] and v [B, T, H, V], chunk by chunk, over a growing past.

    step, history: the emitted functions of one chunk and of one block of the past. rule: names and sizes. state: as in `run_pieces`,
    with `span`.
    Returns y [B, T, H, V] and the state after the last token.
    """
    batch, tokens, heads = q.shape[:3]
    before, position = rule["window"] - 1, state["position"]
    gates = {n: gates[n] for n in rule["gates"]}
    behind_k, behind_v = started(seen_keys(state, before), k, position), started(state["values"], v, position)
    if before:
        gates["window_gate"] = in_sequence(gates["window_gate"], position)
    elif "window_gate" in gates:
        gates["window_gate"] = gates["window_gate"][..., 0]
    carried = [flat(w) for w in (*state["weights"].values(), *(s for own in state["slots"].values() for s in own.values()))]
    anchor = [flat(w) for w in state["anchor"].values()]
    learned = [
        p.expand(heads, *shape).expand(batch, heads, *shape).reshape(-1, *shape)
        for p, shape in ((params[n], s) for n, s in rule["params"].items())
    ]
    span, semantic, finite = state["span"], rule["semantic"], len(rule["weights"])
    past = first_blocks(rule, span)
    held = anchor_block(rule, span) if semantic else None
    base, outputs, lengths = span[0].shape[1], [], []
    for start, stop in chunk_bounds(tokens, position, rule["chunk"], semantic):
        x_q = to_chunks(q[:, start:stop], 0)
        own_k, own_v = k[:, start:stop], v[:, start:stop]
        x_k, x_v = to_windows(behind_k, own_k, 0), to_windows(behind_v, own_v, 0)
        behind_k, behind_v = newest(behind_k, own_k), newest(behind_v, own_v)
        if semantic and (position + start) % rule["chunk"] == 0:
            anchor, held = [w.view_as(w) for w in carried[:finite]], None  # torch.compile takes no tensor twice
        seen = contributions(rule, history, past, held, x_q, x_k, learned)
        sequences = [x_q, x_k, x_v, *(to_chunks(g[:, start:stop], 0) for g in gates.values())]
        y, *rest = step(*sequences, *carried, *(anchor if semantic else ()), *learned, *seen)
        outputs.append(from_chunks(y, batch, False))
        if semantic and held is None:
            held = list(past)
        carried, entries, left = rest[: len(carried)], rest[len(carried) : len(rest) - rule["scales"]], rest[len(rest) - rule["scales"] :]
        past = [aged(block, left) for block in past] + [(x_k, entries, fresh(x_k, rule["scales"]))]
        past = merged(past)
        lengths.append((start, stop))
    after = pack_span(rule, state, carried, anchor, past, held, k, v, lengths, base)
    return torch.cat(outputs, 1), after


def seen_keys(state, before):
    """The `before` keys in front of a call, taken from the span where it holds them, so that a key's gradient has one way back however
    calls are cut."""
    if not before:
        return state["keys"]
    span = state["span"][0]
    known = min(before, span.shape[1])
    return torch.cat([state["keys"][:, : before - known], span[:, span.shape[1] - known :]], 1)


def flat(w):
    """[B, H, ..] -> [g, ..]."""
    return w.reshape(-1, *w.shape[2:])


def chunk_bounds(tokens, position, chunk, semantic):
    """(start, stop) of every chunk of a call, the rest of a begun one first."""
    found = []
    for start, stop, chunks in pieces(tokens, position, chunk, semantic):
        size = (stop - start) // max(chunks, 1)
        found += [(s, s + size) for s in range(start, stop, size)]
    return found


def fresh(keys, scales):
    """Scales of new entries: weight from the own entry, slot from the slot entry."""
    one, zero = keys.new_ones(keys.shape[:2]), keys.new_zeros(keys.shape[:2])
    return [one, zero, one][:scales]


def aged(block, left):
    """A block after a chunk that leaves (a, b, m) of (weight, slot into weight, slot)."""
    keys, entries, scales = block
    if len(scales) == 1:
        return keys, entries, [left[0][:, None] * scales[0]]
    a, b, m = (x[:, None] for x in left)
    own, slot, kept = scales
    return keys, entries, [a * own, a * slot + b * kept, m * kept]


def merged(blocks):
    """Small neighbours at the end joined, so that the number of blocks stays small; full blocks are never copied again."""
    while (
        len(blocks) > 1 and blocks[-2][0].shape[1] + blocks[-1][0].shape[1] <= BLOCK and blocks[-1][0].shape[1] * 2 > blocks[-2][0].shape[1]
    ):
        (k1, e1, s1), (k2, e2, s2) = blocks[-2:]
        joined = (torch.cat([k1, k2], 1), [torch.cat(p, 1) for p in zip(e1, e2)], [torch.cat(p, 1) for p in zip(s1, s2)])
        blocks = [*blocks[:-2], joined]
    return blocks


def contributions(rule, history, past, held, x_q, x_k, learned):
    """What the past adds to the products of the chunk's queries and, where its gradient needs them, keys; keys look at the anchor `held`
    where it differs."""
    parts, split = (2 if rule["slots"] else 1), x_q.shape[1]
    widths = [w for w in rule["infinite"].values() for _ in range(parts)]

    def total(x, blocks):
        sums = [x.new_zeros(*x.shape[:2], width) for width in widths]
        for keys, entries, scales in blocks:
            if keys.shape[1]:
                sums = [s + c for s, c in zip(sums, history(x, keys, *entries, *scales, *learned))]
        return sums

    if not rule["keys_look"]:
        return total(x_q, past)
    if held is None:
        both = total(torch.cat([x_q, x_k], 1), past)
        of_q, of_k = [s[:, :split] for s in both], [s[:, split:] for s in both]
    else:
        of_q, of_k = total(x_q, past), total(x_k, held)
    return [x for i in range(0, len(widths), parts) for x in (*of_q[i : i + parts], *of_k[i : i + parts])]


def first_blocks(rule, span):
    """The past that a state holds, as blocks of at most BLOCK keys."""
    keys, weights, slots, _ = span
    found = []
    for lo in range(0, keys.shape[1], BLOCK):
        part = to_chunks(keys[:, lo : lo + BLOCK], 0)
        entries = []
        for name in rule["infinite"]:
            entries.append(flat(weights[name][..., lo : lo + BLOCK]).mT)
            entries += [flat(s[..., lo : lo + BLOCK]).mT for s in slots[name].values()]
        found.append((part, entries, fresh(part, rule["scales"])))
    return found


def anchor_block(rule, span):
    """The past as it was at the start of the running chunk; its slots do not matter."""
    keys, _, slots, anchor = span
    if not keys.shape[1]:
        return None
    part, entries = to_chunks(keys, 0), []
    for name in rule["infinite"]:
        entries.append(flat(anchor[name]).mT)
        entries += [torch.zeros_like(entries[-1]) for _ in slots[name]]
    return [(part, entries, fresh(part, rule["scales"]))]


def spread(rule, blocks, total, places):
    """Weights and slots of every infinite weight, name -> [g, out, N], from blocks whose columns lie at `places` among all N keys."""
    found = {}
    parts = 2 if rule["slots"] else 1
    columns = sum(b[0].shape[1] for b in blocks)
    place = places[:columns]
    for i, (name, width) in enumerate(rule["infinite"].items()):
        sums = []
        for part in range(parts):
            rows = []
            for _, entries, scales in blocks:
                own = entries[i * parts]
                if part == 0:
                    value = scales[0][..., None] * own
                    rows.append(value + scales[1][..., None] * entries[i * parts + 1] if parts == 2 else value)
                else:
                    rows.append(scales[2][..., None] * entries[i * parts + 1])
            if rows:
                joined = torch.cat(rows, 1)
                empty = joined.new_zeros(joined.shape[0], total, width)
                sums.append(empty.index_add(1, place, joined).mT)
            else:
                sums.append(None)
        found[name] = sums
    return found


def pack_span(rule, state, carried, anchor, past, held, k, v, lengths, base):
    """The state after a call on k, v [B, T, H, ..]; columns of window tokens that several chunks looked at are added up."""
    batch, tokens, heads = k.shape[:3]
    before, names, device = rule["window"] - 1, rule["weights"], k.device
    place = [torch.arange(base, device=device)] + [torch.arange(base + lo - before, base + hi, device=device) for lo, hi in lengths]
    place = torch.cat(place).clamp_min(0)  # tokens before the sequence's start have entries of 0
    total = base + tokens

    def shaped(x):
        return x.reshape(batch, heads, *x.shape[1:])

    def nothing(width):
        return k.new_zeros(batch, heads, width, total)

    now = spread(rule, past, total, place)
    infinite = {n: shaped(s[0]) for n, s in now.items()}
    infinite_slots = {n: {slot: shaped(s[1]) for slot in rule["slots"]} for n, s in now.items()}
    infinite_anchor = {}
    if rule["semantic"]:
        if (state["position"] + tokens) % rule["chunk"] == 0:
            infinite_anchor, anchor = dict(infinite), carried[: len(names)]
        else:
            then = spread(rule, held or [], total, place)
            infinite_anchor = {n: nothing(rule["infinite"][n]) if s[0] is None else shaped(s[0]) for n, s in then.items()}
    slots = iter(shaped(w) for w in carried[len(names) :])
    all_keys = torch.cat([state["span"][0], k], 1)
    return {
        "weights": {n: shaped(w) for n, w in zip(names, carried)},
        "slots": {n: {s: next(slots) for s in rule["slots"]} for n in names},
        "anchor": {n: shaped(a) for n, a in zip(names, anchor)} if rule["semantic"] else {},
        "keys": newest(state["keys"], k).clone(),
        "values": newest(state["values"], v).clone(),
        "position": state["position"] + tokens,
        "span": (all_keys, infinite, infinite_slots, infinite_anchor),
    }
