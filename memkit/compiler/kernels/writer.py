"""Lines of Python with names, indentation, and a memory of what each block has already computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memkit.compiler.names import unused


class Writer:
    """Text under construction. `known` finds what was computed in this block or one around it."""

    def __init__(self, taken: set[str], depth: int = 1) -> None:
        self.lines: list[str] = []
        self.depth = depth
        self.taken = taken
        self._scopes: list[dict[Any, Any]] = [{}]

    def line(self, text: str = "") -> None:
        self.lines.append("    " * self.depth + text if text else "")

    def name(self, hint: str) -> str:
        """`hint`, or hint with the first number that makes it new."""
        return unused(hint, self.taken)

    def let(self, hint: str, text: str) -> str:
        """A new variable with this value."""
        name = self.name(hint)
        self.line(f"{name} = {text}")
        return name

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """What is written inside stands under `header`, and what it remembers ends with it. An empty header only forgets."""
        if header:
            self.line(header)
            self.depth += 1
        self._scopes.append({})
        try:
            yield
        finally:
            self._scopes.pop()
            if header:
                self.depth -= 1

    def known(self, key: Any) -> Any:
        for scope in reversed(self._scopes):
            if key in scope:
                return scope[key]
        return None

    def remember(self, key: Any, value: Any) -> Any:
        self._scopes[-1][key] = value
        return value

    def forget(self) -> None:
        """What was read may have changed."""
        self._scopes = [{} for _ in self._scopes]
