"""C++ for tests: not optimised, so that it compiles in half a second, and with scratch memory that gives mistakes away.

Tests that want vector code ask for `optimised`. What is compiled is shared by all workers of a run, and kept from run to run where
$MEMKIT_CACHE names a folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from memkit.compiler import native_build, native_run

from . import rules

POISONED = Path(__file__).parent / "poisoned.h"
QUICK = f"-O0 -include {POISONED}"
OPTIMISED = f"-O1 -ftree-vectorize -include {POISONED}"
NO_COMPILER = "needs a C++ compiler and none is installed"


def forget() -> None:
    """What was found out about the compiler is asked anew."""
    for found in (native_build.compiler, native_build.flags, native_build.target, native_build._own_folder):
        found.cache_clear()


@pytest.fixture(autouse=True, scope="package")
def _quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MEMKIT_CXXFLAGS", QUICK), ("MEMKIT_CACHE", str(shared / "memkit"))):
            if name not in os.environ:
                patch.setenv(name, value)
        forget()
        yield
    forget()


_RULES: dict = {}
_KNOWN: dict = {}


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules of their own, whose C++ is vector code."""
    monkeypatch.setattr(rules, "_RULES", _RULES)
    monkeypatch.setattr(native_run, "_KNOWN", _KNOWN)
    monkeypatch.setenv("MEMKIT_CXXFLAGS", OPTIMISED)
    forget()
    yield
    monkeypatch.undo()
    forget()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if native_build.compiler() is not None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("without_compiler"):
            item.add_marker(pytest.mark.skip(reason=NO_COMPILER))
