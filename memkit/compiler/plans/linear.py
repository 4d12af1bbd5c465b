"""Plan `linear`: a gradient that does not depend on the memory, so that a chunk of any size is exact: masked product and state scan.

Equals the token loop. It is the frozen chunk with gradients that are the same at every memory.
"""

from __future__ import annotations

from memkit.compiler.build import Equations
from memkit.compiler.facts import Facts
from memkit.compiler.ir import Graph

from . import frozen
from .chunk import chunked


def refuse(facts: Facts) -> str | None:
    """Why this plan cannot run the spec, or None."""
    if facts.gradient_degree > 0:
        return f"the inner gradient depends on the prediction (degree {facts.gradient_degree:g}), so on the memory"
    if not facts.memory_linear:
        return "the memory is not linear in one weight"
    if facts.optimizer is None:
        return "the inner optimizer is not linear in the gradient"
    if facts.retention == "other":
        return "retention is not a factor"
    if not facts.finite:
        return "the features exist only as a kernel"
    return None


def graphs(eq: Equations, facts: Facts) -> dict[str, Graph]:
    """The plan's graphs; see `chunked`."""
    return chunked(eq, facts, frozen.body)


def tile(facts: Facts) -> int:
    """Tokens a tile; no effect on results."""
    return 16 if facts.retention == "diagonal" else 64
