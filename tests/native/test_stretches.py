"""Stretches of tables of indices: they say what the tables say, and there are few."""

from __future__ import annotations

import re

import pytest

from memkit.compiler.native.stretches import Kind, kinds

from .rules import wide

WIDTH = 20
PAIRS = [(i, j) for i in range(WIDTH) for j in range(i, WIDTH)]
FIRST, SECOND = (tuple(p[k] for p in PAIRS) for k in (0, 1))


def numbers(found: tuple[Kind, ...], table: tuple[int, ...]) -> list[int]:
    """A table as its stretches have it."""
    made = [-1] * len(table)
    for kind in found:
        for begin, end, first in zip(kind.begins, kind.ends, kind.firsts[table], strict=True):
            for i in range(begin, end):
                assert made[i] == -1, "no entry lies in two stretches"
                made[i] = first + kind.steps[table] * (i - begin)
    return made


def test_stretches_of_one_table() -> None:
    (rising,) = kinds(((3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6, 7),))
    assert (rising.begins, rising.ends) == ((0, 8), (8, 16))
    ((table, firsts),) = rising.firsts.items()
    assert firsts == (3, 0) and rising.steps[table] == 1


@pytest.mark.parametrize("extra", [(), (0,), (0, 1)])
def test_stretches_say_what_the_tables_say(extra: tuple[int, ...]) -> None:
    """The products of all pairs, as a polynomial has them: the first is the same all along, the second rises; and single entries."""
    first, second = (*extra, *FIRST, *FIRST), (*extra[::-1], *SECOND, *SECOND)
    found = kinds((first, second))
    assert numbers(found, first) == list(first) and numbers(found, second) == list(second)
    assert sum(len(kind.begins) for kind in found) <= 2 * WIDTH + len(extra)


@pytest.mark.parametrize("table", [tuple(range(0, 64, 2)), tuple(reversed(range(32))), (0, 2, 1, 3) * 8, (0, 1, 2) * 20, (5,)])
def test_no_short_or_uneven_stretches(table: tuple[int, ...]) -> None:
    assert kinds((table,)) == ()


@pytest.mark.parametrize("case", ["features in stretches", "long chunks of features in stretches"])
def test_polynomials_gather_nothing(case: str) -> None:
    """No loop over features reads an index from memory, and constant factors of features are made once a call."""
    module = wide(case).native.module
    assert "stretch" in module.source and not re.search(r"index_table\w*\[(p\w*|a\d\w*)\]", module.source)
    before, loop = module.functions["chunks"].text.split("for (long n_step")
    assert "fn_sqrt" in before and "fn_sqrt" not in loop
