"""What components answer about themselves (widths, shapes, starts), checked: a third party's may raise, or answer something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .component import Component
from .errors import MemkitError, SpecError


def ask(component: Component, method: str, *args: Any) -> Any:
    """What a method of a component answers.

    Raises:
        SpecError: naming the component, for whatever the method raises.
    """
    try:
        return getattr(component, method)(*args)
    except MemkitError:
        raise
    except Exception as error:
        text = f"{method} of {component.kind!r}: {type(error).__name__}: {error}".split("\n")[0][:300]
        raise SpecError(text, f"an answer to {method}({', '.join(map(_shown, args))})", "", component.family) from error


def feature_width(features: Component, key_dim: int) -> int:
    """F for a given K."""
    width = ask(features, "width", key_dim)
    if not _whole(width):
        raise SpecError(f"width of {features.kind!r} returns a width of {_shown(width)}", "a whole number >= 1", "", features.family)
    return width


def weight_shapes(memory: Component, features: int, values: int) -> dict[str, tuple[int, int]]:
    """Weight name -> [out, in]."""
    asked = f"for shapes({features}, {values})"
    found = _named(memory, "shapes", ask(memory, "shapes", features, values), f"a dict of weight name -> (out, in) {asked}", "")
    for n, shape in found.items():
        if not isinstance(shape, tuple | list) or len(shape) != 2 or not all(map(_whole, shape)):
            shown = f"of shape {[_shown(size) for size in shape]}".replace("'", "") if isinstance(shape, tuple | list) else _shown(shape)
            wanted = f"[out, in], two whole numbers >= 1, {asked}"
            raise SpecError(f"shapes of {memory.kind!r} gives weight {n} {shown}", wanted, "", memory.family)
    if not found:
        raise SpecError(f"shapes of {memory.kind!r} returns no weight", "one or more", "", memory.family)
    return {n: (shape[0], shape[1]) for n, shape in found.items()}


def learned_scalars(component: Component, *args: Any) -> dict[str, Tensor]:
    """The learned scalars of a feature map or a memory, and their start."""
    wanted = "a dict of name -> floating tensor"
    found = _named(component, "params", ask(component, "params", *args), wanted)
    for n, p in found.items():
        if not isinstance(p, Tensor) or not p.is_floating_point():
            raise SpecError(f"params of {component.kind!r} gives {n}: {_shown(p)}", wanted, "{} for none", component.family)
    return dict(found)


def fresh_weight(memory: Component, shape: tuple[int, ...], generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    """A fresh weight [H, out, in] in the type asked for."""
    found = ask(memory, "init", shape, generator, dtype)
    if not isinstance(found, Tensor) or tuple(found.shape) != shape or not found.is_floating_point():
        raise SpecError(f"init of {memory.kind!r} returns {_shown(found)}", f"a floating tensor {list(shape)}", "", memory.family)
    return found.to(dtype)


def starting_slots(optimizer: Component, W: Tensor) -> dict[str, Tensor]:
    """The optimizer's slots for a weight, each a tensor of its shape."""
    wanted = "a dict of tensors shaped like W"
    found = _named(optimizer, "init", ask(optimizer, "init", W), wanted)
    for n, t in found.items():
        if not isinstance(t, Tensor) or t.shape != W.shape:
            got = f"init of {optimizer.kind!r} gives {n}: {_shown(t)} for W {list(W.shape)}"
            raise SpecError(got, wanted, "{} for none", optimizer.family)
    return dict(found)


def _named(component: Component, method: str, found: Any, wanted: str, hint: str = "{} for none") -> Mapping[str, Any]:
    """`found`, which must be a mapping from names that emitted code can use."""
    if not isinstance(found, Mapping):
        raise SpecError(f"{method} of {component.kind!r} returns {_shown(found)}", wanted, hint, component.family)
    wrong = [n for n in found if not isinstance(n, str) or not n.isidentifier()]
    if wrong:
        got = f"{method} of {component.kind!r} returns the name {_shown(wrong[0])}"
        raise SpecError(got, "names of letters, digits and _", "", component.family)
    return found


def _whole(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _shown(x: Any) -> str:
    """A value in a message: numbers, words and sizes as they are, tensors by type and shape, all else by type."""
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)} of {x.dtype}"
    plain = x is None or isinstance(x, int | float | str | torch.dtype)
    plain = plain or (isinstance(x, tuple) and all(isinstance(size, int) for size in x))
    return repr(x)[:100] if plain else f"{type(x).__name__}"
