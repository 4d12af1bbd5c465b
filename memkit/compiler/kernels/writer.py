"""Lines of Python with names, indentation, and a memory of what each block has already computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
        base = re.sub(r"\W", "_", hint).strip("_") or "x"
        base = f"x{base}" if base[0].isdigit() else base
        name, count = base, 1
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name

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
