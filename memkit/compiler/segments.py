"""A function over all chunks, called with as many at a time as the cache holds. Copied into emitted files, so it needs torch alone."""

from __future__ import annotations

import torch


def in_segments(function, layout, inputs, numbers, most):
    """function(*inputs) -> (y, states, saved values), `most` numbers of its largest intermediate at a time.

    layout: how many inputs are sequences [n, g, ..], and how many, behind them, are states that one call hands to the next; the rest are
    the same in every call. numbers: those in the largest intermediate of one chunk and head.
    Returns y of all chunks, the last states, and what every call saves, call after call.
    """
    sequences, states, rest = _parted(layout, inputs)
    if not sequences:
        return function(*inputs)
    outputs, saved = [], []
    for parts in zip(*(x.split(_chunks(sequences[0], numbers, most)) for x in sequences)):
        y, *found = function(*parts, *states, *rest)
        states = found[: len(states)]
        outputs.append(y)
        saved += found[len(states) :]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs), *states, *saved)


def pulled_in_segments(function, layout, names, inputs, saved, grads, numbers, most):
    """The gradients of `inputs`, by name: the calls of `in_segments` from the last to the first.

    function: dict of inputs, saved values and gradients by name -> dict of gradients; a name that it lacks has a gradient of 0.
    names: of the inputs, of the values one call saves, and of the gradients of y and of the states.
    """
    inputs_named, saved_named, (grad_y, *grad_states) = names
    sequences, states, rest = _parted(layout, inputs)
    if not sequences:
        return function(dict(zip((*inputs_named, *saved_named, grad_y, *grad_states), (*inputs, *saved, *grads))))
    size, width = _chunks(sequences[0], numbers, most), len(saved_named)
    calls = list(zip(*(x.split(size) for x in (*sequences, grads[0]))))
    carried = inputs_named[len(sequences) : len(sequences) + len(states)]
    back, found, sums = list(grads[1:]), [], {}
    for i in reversed(range(len(calls))):
        given = (*calls[i][:-1], *states, *rest, *saved[i * width : (i + 1) * width], calls[i][-1], *back)
        got = function(dict(zip((*inputs_named, *saved_named, grad_y, *grad_states), given)))
        back = [got[n] if n in got else torch.zeros_like(x) for n, x in zip(carried, states)]
        found.append(got)
        for name in inputs_named[len(sequences) + len(states) :]:
            if name in got:
                sums[name] = sums[name] + got[name] if name in sums else got[name]
    joined = {n: torch.cat([got[n] for got in found[::-1]]) for n in inputs_named[: len(sequences)] if n in found[0]}
    return {**joined, **dict(zip(carried, back)), **sums}


def _parted(layout, inputs):
    """(sequences, states, the rest)."""
    first, second = layout[0], layout[0] + layout[1]
    return inputs[:first], inputs[first:second], inputs[second:]


def _chunks(x, numbers, most):
    """Chunks a call."""
    return max(1, most // (x.shape[1] * numbers))
