"""Plain data out of what Python code gives instead of YAML: mappings, sequences, numbers, strings and components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from .document import MAX_DEPTH, MAX_DIGITS, MAX_NODES, NO_TEXT, TOO_DEEP, KeyPath, dotted, is_text, shown, type_name
from .errors import SpecError


def from_python(value: Any) -> Any:
    """Plain data from what Python code gave. All mistakes raised together."""
    reader = _Reader()
    data = reader.walk(value, ())
    if reader.problems:
        raise SpecError.several(reader.problems)
    return data


class _Reader:
    """Walks a value once, collecting mistakes."""

    def __init__(self) -> None:
        self.problems: list[SpecError] = []
        self.count = 0

    def fail(self, path: KeyPath, got: str, expected: str) -> None:
        self.problems.append(SpecError(got, expected, "", dotted(path)))

    def walk(self, value: Any, path: KeyPath) -> Any:
        self.count += 1
        if len(path) > MAX_DEPTH or self.count > MAX_NODES:
            raise SpecError(TOO_DEEP if len(path) > MAX_DEPTH else f"more than {MAX_NODES} values", "a spec", "", dotted(path[:6]))
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            if not is_text(value):
                self.fail(path, shown(value), NO_TEXT)
            return str(value)
        if isinstance(value, Real):
            return self.number(value, path)
        if hasattr(type(value), "__pydantic_fields__"):  # a model; its class is none
            return self.walk(value.model_dump(), path)
        if isinstance(value, Mapping):
            return self.mapping(value, path)
        if isinstance(value, list | tuple):
            return [self.walk(inner, (*path, i)) for i, inner in enumerate(value)]
        if isinstance(value, type):
            self.fail(path, f"the class {value.__name__}", "an instance of it, or a kind")
            return None
        self.fail(path, f"a value of type {type_name(value)}", "strings, numbers, true, false, null, lists, mappings or components")
        return None

    def mapping(self, value: Mapping[Any, Any], path: KeyPath) -> dict[str, Any]:
        out = {}
        for key, inner in value.items():
            if isinstance(key, str):
                out[str(key)] = self.walk(inner, (*path, str(key)))
            else:
                self.fail(path, f"the key {shown(key)}", "keys that are strings")
        return out

    def number(self, value: Any, path: KeyPath) -> int | float:
        if isinstance(value, Integral):
            if abs(int(value)) < 10**MAX_DIGITS:
                return int(value)
            self.fail(path, f"a number of more than {MAX_DIGITS} digits", "a smaller number")
            return 0
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if math.isfinite(result):
            return result
        self.fail(path, f"{path[-1] if path else ''}: {value}", "a finite number")
        return 0
