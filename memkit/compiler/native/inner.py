"""A number that is the sum of two matrices' products entry by entry: a call of `inner`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from memkit.compiler.ir import Node, Op
from memkit.compiler.kernels import keep

from .entries import Index, View, plus

if TYPE_CHECKING:
    from .step import Step
    from .text import Function


def is_inner(f: Function, node: Node) -> bool:
    """Whether a value is such a number, of matrices whose rows lie in one piece each."""
    gone = keep.contracted(node)
    if node.op is not Op.EINSUM or f.own(node) or len(gone) != 2:
        return False
    views = _views(f, node)
    return len(views) == 2 and all(a in view.strides for view in views for a in gone) and bool(_columns(views, gone))


def inner(made: Step, node: Node, sizes: Mapping[str, str]) -> list[str]:
    """The call that makes it, or a member's part of it. sizes: of the axes that are summed."""
    views, gone, bounds = _views(made.f, node), keep.contracted(node), made.bounds()
    columns = _columns(views, gone)
    rows = next(a for a in gone if a != columns)
    parts = {a: bounds.get(a, ("0", sizes[a])) for a in (rows, columns)}
    at = made.f.fixed | {a: Index(first) for a, (first, _) in parts.items()}
    arguments = [parts[rows][1], parts[columns][1]]
    for view in views:
        made.note_view(view)
        arguments += [plus(view.pointer, view.offset({a: at[a] for a in view.strides})), view.strides[rows]]
    return [f"{made.out.pointer}[{made.out.offset(at)}] = inner({', '.join(arguments)});"]


def _views(f: Function, node: Node) -> list[View]:
    return [view for a in node.args if (view := f.view(a)) is not None]


def _columns(views: list[View], gone: Iterable[str]) -> str:
    """The axis along which both matrices lie in one piece."""
    return next((a for a in gone if all(view.strides[a] == "1" for view in views)), "")
