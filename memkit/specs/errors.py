"""The errors a user can meet. Each says where, what was got, what was expected and what to try, always in this order."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

MAX_SHOWN = 20


def near(word: Any, known: Iterable[Any]) -> str:
    """`did you mean ...?` for the closest of `known`, or the empty string."""
    names = {str(k).lower(): str(k) for k in known}
    match = difflib.get_close_matches(str(word)[:80].lower(), names, n=1, cutoff=0.6)
    return f"did you mean {names[match[0]]}?" if match else ""


class MemkitError(Exception):
    """Base of every error raised for something a user gave.

    Args:
        got: what was found.
        expected: what would have been accepted.
        hint: a fix or a near name; shown as `try`.
        where: spec path, argument or file:line:column.
    """

    def __init__(self, got: str, expected: str = "", hint: str = "", where: str = "") -> None:
        self.got, self.expected, self.hint, self.where = got, expected, hint, where
        super().__init__(self._text())

    def _text(self) -> str:
        head = type(self).__name__ + (f" at {self.where}" if self.where else "")
        rows = (("got", self.got), ("expected", self.expected), ("try", self.hint))
        return "\n".join([head, *(f"  {label:<9} {text}" for label, text in rows if text)])

    def __str__(self) -> str:
        return self._text()

    def at(self, where: str) -> MemkitError:
        """The same error at another place; the border (load, compile, forward) adds the place once."""
        return type(self)(self.got, self.expected, self.hint, where)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.got, self.expected, self.hint, self.where)


class SpecError(MemkitError):
    """A spec that cannot be read or has no meaning. `problems` lists every mistake found, this one included."""

    def __init__(self, got: str, expected: str = "", hint: str = "", where: str = "", problems: Sequence[MemkitError] = ()) -> None:
        self.problems: tuple[MemkitError, ...] = tuple(problems)
        super().__init__(got, expected, hint, where)
        self.problems = self.problems or (self,)

    @classmethod
    def several(cls, problems: Sequence[MemkitError]) -> SpecError:
        """One error that reports all of `problems`."""
        first = problems[0]
        return cls(first.got, first.expected, first.hint, first.where, problems)

    def at(self, where: str) -> SpecError:
        """The same error at another place; of several mistakes, those without a place are put there."""
        if len(self.problems) < 2:
            return SpecError(self.got, self.expected, self.hint, where)
        return SpecError.several([p if p.where else p.at(where) for p in self.problems])

    def __reduce__(self) -> tuple[Any, ...]:
        several = self.problems if len(self.problems) > 1 else ()
        return SpecError, (self.got, self.expected, self.hint, self.where, several)

    def _text(self) -> str:
        if len(self.problems) < 2:
            return super()._text()
        parts = [MemkitError._text(p) for p in self.problems[:MAX_SHOWN]]
        more = len(self.problems) - MAX_SHOWN
        return "\n".join([f"{len(self.problems)} mistakes", *parts, *([f"and {more} more"] if more > 0 else [])])


class ShapeError(MemkitError):
    """Tensors that do not fit the rule; lists the sizes bound so far (`B=2 T=77 H=4 K=64`)."""


class PlanError(MemkitError):
    """A pinned plan that refuses the spec, or one that cannot hold its memory."""


class KernelError(MemkitError):
    """A backend that cannot run here."""
