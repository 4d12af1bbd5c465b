"""The library's own drawn specs, run on the inputs that these tests draw."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from memkit.strategies import Run, runs
from tests.cases import Inputs, draw


class Case(Run):
    """A drawn run whose inputs are those of `tests.cases.draw`."""

    def inputs(self, rule: Any = None) -> Inputs:  # type: ignore[override]
        """Random inputs of all prefix + tokens tokens."""
        return draw(rule or self.rule(), B=self.batch, T=self.prefix + self.tokens, H=self.heads, seed=self.seed)


def cases(grad_at: str, finite: bool = True) -> st.SearchStrategy[Case]:
    """Whole specs under one `grad_at`, with features of finite width or with a kernel only, and a run of each."""
    return runs(grad_at, finite).map(lambda run: Case(*run))
