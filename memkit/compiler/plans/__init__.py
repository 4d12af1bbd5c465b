"""The plans, best first. Each module answers `refuse(facts) -> str | None`, lowers with `graphs(equations, facts) -> dict[str, Graph]`
(`chunks`, all whole chunks, and `resume`, part of one) and knows its tokens: `tile(facts) -> int`. A plan with `resume` alone, which is
called for a block of a chunk's tokens, has `blocks(equations, facts) -> Graph`: several such calls, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

from memkit.compiler.facts import Facts
from memkit.specs.errors import PlanError

from . import frozen, linear, orthogonal, scan, solve, span

PLANS: Mapping[str, ModuleType] = MappingProxyType(
    {"linear": linear, "solve": solve, "frozen": frozen, "orthogonal": orthogonal, "span": span, "scan": scan}
)


@dataclass(frozen=True)
class Choice:
    """The plan that runs and, for every other one, why not ("" where it would have done as well)."""

    name: str
    refused: tuple[tuple[str, str], ...]
    pinned: bool = False


def choose(facts: Facts, pin: str = "auto") -> Choice:
    """The first plan that accepts, or the pinned one.

    Raises:
        PlanError: an unknown plan, or a pinned one that refuses.
    """
    answers = {name: plan.refuse(facts) for name, plan in PLANS.items()}
    if pin != "auto":
        if pin not in PLANS:
            raise PlanError(f"plan {pin!r}", "auto, " + ", ".join(PLANS), "", "plan")
        if answers[pin] is not None:
            able = [n for n, a in answers.items() if a is None]
            raise PlanError(
                f"plan {pin!r} for this spec",
                f"a spec it accepts; here {answers[pin]}",
                f"plan: auto (here {able[0]})" if able else "",
                "plan",
            )
    name = pin if pin != "auto" else next((n for n, a in answers.items() if a is None), "")
    if not name:
        raise PlanError("a spec that every plan refuses", "; ".join(f"{n}: {a}" for n, a in answers.items()), "", "plan")
    return Choice(name, tuple((n, a or "") for n, a in answers.items() if n != name), pin != "auto")
