"""Identifiers of emitted code."""

from __future__ import annotations

import re
from collections.abc import Container


def unused(hint: str, taken: set[str], reserved: Container[str] = ()) -> str:
    """`hint` made an identifier, with the first number that makes it new; it is taken from now on."""
    base = re.sub(r"\W", "_", hint).strip("_") or "x"
    base = f"x{base}" if base[0].isdigit() or base in reserved else base
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name
