"""The few steps that are more than one torch call: `emit_torch` copies their source, word for word, into the code it emits.

So each stands alone: torch and the other functions of this file, nothing else; no data-dependent branch, no write to an argument.
"""

import torch
import torch._C._functorch


def pad(x: torch.Tensor, dim: int, before: int, after: int, value: float = 0.0) -> torch.Tensor:
    """x with `before` and `after` entries of `value` put around it along `dim` (counted from the end)."""
    return torch.nn.functional.pad(x, (0, 0) * (-dim - 1) + (before, after), value=value)


def decay(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """[.., t, ..] -> [.., t, s, ..]: the product of x_r over s < r <= t, zero where s > t; exact where x is zero."""
    size = x.shape[dim]
    if dim == -1 and size > 32:
        return decay_blocks(x)
    kept = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    if dim == -1:
        return torch.where(kept.tril(-1), x[..., None], 1.0).cumprod(-2).tril()
    kept = kept[(..., *(None,) * (-dim - 1))]
    below = kept.logical_and(kept.transpose(0, 1).logical_not())
    return torch.where(kept, torch.where(below, x.unsqueeze(dim), 1.0).cumprod(dim - 1), 0.0)


def decay_blocks(x: torch.Tensor, block: int = 16) -> torch.Tensor:
    """`decay` along the last axis by blocks: a running product inside each, an outer product between two of them."""
    size = x.shape[-1]
    x = pad(x, -1, 0, -size % block, 1.0).unflatten(-1, (-1, block))  # [.., blocks, t]
    inside = decay(x)  # [.., blocks, t, s]
    head = x[..., :1] * inside[..., 0]  # from the block's start to t
    tail = inside[..., -1, :]  # from s to the block's end
    between = pad(decay(head[..., -1])[..., :-1, :], -2, 1, 0)  # the blocks strictly between two; zero on the diagonal
    out = (head[..., None] * between[..., None, :])[..., None] * tail[..., None, None, :, :]  # [.., blocks, t, blocks, s]
    out = out.diagonal_scatter(inside.movedim(-3, -1), 0, -4, -2)
    return out.flatten(-2).flatten(-3, -2)[..., :size, :size]


def band(x: torch.Tensor) -> torch.Tensor:
    """[.., t, j] -> [.., t, s]: row t moved right by t, so that out[t, t + j] = x[t, j]; s is t + j - 1 long."""
    rows, slots = x.shape[-2:]
    # rows one entry longer than the result's: read as one line and cut anew, each starts one further right
    return pad(x, -1, 0, rows).flatten(-2)[..., :-rows].unflatten(-1, (rows, rows + slots - 1))


def unband(x: torch.Tensor, slots: int) -> torch.Tensor:
    """[.., t, s] -> [.., t, j]: out[t, j] = x[t, t + j]."""
    return torch.stack([x.diagonal(j, -2, -1) for j in range(slots)], -1)


def shift(x: torch.Tensor, fill: torch.Tensor, dim: int, by: int) -> torch.Tensor:
    """x moved one place along `dim` (counted from the end); `fill`, without that axis, enters at the free end."""
    fill = fill.expand(x.select(dim, 0).shape).unsqueeze(dim)
    size = x.shape[dim] - 1
    return torch.cat([fill, x.narrow(dim, 0, size)] if by > 0 else [x.narrow(dim, 1, size), fill], dim)


def overlap_add(x: torch.Tensor, dim: int, length: int, step: int) -> torch.Tensor:
    """[.., outer, inner, ..] -> [.., length, ..]: out[o * step + i] += x[o, i]; `dim` is inner's, counted from the end."""
    outer, inner = x.shape[dim - 1], x.shape[dim]
    parts = -(-inner // step)  # each holds `step` entries of every window, which lie side by side in the result
    x = pad(x, dim, 0, parts * step - inner).unflatten(dim, (parts, step))
    out = pad(x.select(dim - 1, 0), dim - 1, 0, parts - 1)
    for i in range(1, parts):
        out = out + pad(x.select(dim - 1, i), dim - 1, i, parts - 1 - i)
    out = out.flatten(dim - 1, dim)
    return pad(out, dim, 0, length - (outer + parts - 1) * step)


def blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[.., r, r] -> [.., r / size, size, size]: the blocks on the diagonal."""
    return x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).diagonal(0, -4, -2).movedim(-1, -3)


def unit_inverse(lower: torch.Tensor) -> torch.Tensor:
    """The inverse of I + tril(lower, -1): blocks of 16 by substitution, then two at a time, [A, 0; C, B] -> [A', 0; -B' C A', B']."""
    size, done = lower.shape[-1], 16  # powers of `lower` would be faster still, and lose four digits where keys repeat
    full = done
    while full < size:
        full *= 2
    lower = torch.nn.functional.pad(lower, (0, full - size, 0, full - size))
    eye = torch.eye(done, dtype=lower.dtype, device=lower.device)
    out = torch.linalg.solve_triangular(blocks(lower, done), eye, upper=False, unitriangular=True)  # [.., blocks, 16, 16]
    while done < full:
        first, second = out[..., 0::2, :, :], out[..., 1::2, :, :]
        cross = second @ (blocks(lower, 2 * done)[..., done:, :done] @ first)
        out = torch.cat([pad(first, -1, 0, done), torch.cat([-cross, second], -1)], -2)
        done *= 2
    return out[..., 0, :size, :size]


def solve(lower: torch.Tensor, b: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    """x with (I + tril(lower, -1)) x = b, or with its transpose; lower [.., r, r], b [.., r, m]."""
    size, block = lower.shape[-1], 64
    if size <= 16:
        return torch.linalg.solve_triangular(lower.mT if transpose else lower, b, upper=transpose, unitriangular=True)
    if size <= block:
        inverse = unit_inverse(lower)
        return (inverse.mT if transpose else inverse) @ b
    found: list[torch.Tensor] = []
    for start in range(0, size, block):
        end = min(start + block, size)
        if transpose:
            start, end = size - end, size - start
            coupling = lower[..., end:, start:end].mT
        else:
            coupling = lower[..., start:end, :start]
        rest = b[..., start:end, :]
        if found:
            rest = rest - coupling @ torch.cat(found[::-1] if transpose else found, -2)
        found.append(solve(lower[..., start:end, start:end], rest, transpose))
    return torch.cat(found[::-1] if transpose else found, -2)


def from_runs(*runs: tuple[float, int, int]) -> torch.Tensor:
    """Numbers in a row, each run given as (first, how many, step)."""
    dtype = torch.long if all(isinstance(first, int) for first, _, _ in runs) else torch.float64
    return torch.cat([first + step * torch.arange(count, dtype=dtype) for first, count, step in runs])


def pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[.., index]; on a CPU this is several times as fast as index_select along the last axis."""
    return torch.gather(x, -1, index.expand(*x.shape[:-1], -1))


def sum_groups(x: torch.Tensor, index: torch.Tensor, sources: torch.Tensor, dim: int) -> torch.Tensor:
    """out[i] = the sum of x[j] along `dim` (counted from the end) over all j with index[j] = i.

    sources[i] are these j, filled up with x's length. The result is the same on each run: only a CPU adds one after another.
    """
    groups, size = sources.shape
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        zeros = x.new_zeros(tuple(groups if i == x.dim() + dim else n for i, n in enumerate(x.shape)))
        return zeros.scatter_add(dim, index[(..., *(None,) * (-dim - 1))].expand(x.shape), x)
    taken = pad(x, dim, 0, 1).index_select(dim, sources.flatten())
    return taken.unflatten(dim, (groups, size)).sum(dim)


def gelu_slope(x: torch.Tensor) -> torch.Tensor:
    """The derivative of gelu."""
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x)


def silu_slope(x: torch.Tensor) -> torch.Tensor:
    """The derivative of silu."""
    gate = torch.sigmoid(x)  # aten's silu_backward has no derivative of its own
    return gate * (1 + x * (1 - gate))


_HERE: dict = {}  # constants on the devices and in the types they were asked for


def constant(table: torch.Tensor, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`table` on the device (and, unless given, in the type) of `like`, copied there once."""
    dtype = dtype or like.dtype
    if table.device == like.device and table.dtype == dtype:
        return table
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        return table.to(like.device, dtype)  # a tensor of the tracer's or the transform's must not outlive it
    key = id(table), dtype, like.device
    if key not in _HERE:
        with torch.inference_mode(False):
            _HERE[key] = table.to(like.device, dtype)
    return _HERE[key]
