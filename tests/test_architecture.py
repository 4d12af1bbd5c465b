"""The shape of the code: which way imports go, what the compiler may know, what docstrings say, how long files and functions are."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from memkit.compiler import passes
from memkit.compiler.facts import Facts
from memkit.specs import layer  # noqa: F401 (fills the registry of families)
from memkit.specs.component import FAMILIES, Component

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "memkit"
FILES = sorted(PACKAGE.rglob("*.py"))
RANKS = {"specs": 0, "compiler": 1, "layers": 2}  # a module of memkit itself ranks 3; imports go down or stay
MAX_FILE = 400
MAX_FUNCTION = 50
# Words of the compiler's own that happen to be kinds too: word -> (files, why it is there).
OWN_WORDS = {
    "linear": ("*", "a plan's name"),
    "scalar": ("*", "a fact: retention is one factor a head"),
    "number": ("emit_*.py kernels/*.py resources.py", "a written value without axes"),
    "none": ("trace_ops.py", "an argument of torch.gelu"),
    "dot": ("trace_ops.py", "torch.dot"),
    "relu": ("trace_ops.py", "torch.relu"),
    "input": ("match.py", "a vertex that stands for an input"),
}


def rank(parts: tuple[str, ...]) -> int:
    """3 for memkit's own modules, else the rank of the package below it."""
    return RANKS.get(parts[1], 3) if len(parts) > 1 else 3


def module_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix("").parts


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, absolute module parts) of everything of memkit that a file imports, also inside functions."""
    own = module_of(path)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(a.name.split("."))) for a in node.names if a.name.split(".")[0] == "memkit")
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level] if node.level else ()
            parts = (*base, *(node.module or "").split(".")) if node.module else base
            if parts[:1] == ("memkit",):
                yield from ((node.lineno, (*parts, a.name)) for a in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    own = rank(module_of(path))
    wrong = [f"{path.relative_to(ROOT)}:{line} imports {'.'.join(parts)}" for line, parts in imports(path) if rank(parts) > own]
    assert not wrong, "\n".join(wrong)


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is not a docstring."""
    tree = parsed(path)
    said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value


KINDS = {kind for family in FAMILIES.values() for kind in family.members}


@pytest.mark.parametrize("path", sorted((PACKAGE / "compiler").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_compiler_names_no_kind(path: Path) -> None:
    """Plans are chosen by what equations do: a new kind must never need a line in the compiler."""
    inside = path.relative_to(PACKAGE / "compiler")
    known = {word for word, (files, _) in OWN_WORDS.items() if any(inside.match(pattern) for pattern in files.split())}
    wrong = [f"{path.relative_to(ROOT)}:{line} says {text!r}" for line, text in literals(path) if text in KINDS - known]
    assert not wrong, "\n".join(wrong)


def test_every_fact_is_read() -> None:
    """A fact that no plan, and nothing else in the compiler, asks for is inferred for nothing."""
    trees = [parsed(p) for p in (PACKAGE / "compiler").rglob("*.py")]
    reads = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    asked = {n.attr for n in reads if getattr(n.value, "attr", getattr(n.value, "id", "")) in ("facts", "known")}
    assert not {field.name for field in dataclasses.fields(Facts)} - asked


MEMBERS = [(n, k) for n, family in FAMILIES.items() for k, m in family.members.items() if m.__module__.startswith("memkit.")]


@pytest.mark.parametrize(("family", "kind"), MEMBERS)
def test_components_say_what_they_compute(family: str, kind: str) -> None:
    member: type[Component] = FAMILIES[family].members[kind]
    text = inspect.getdoc(member) or ""
    missing = [part for part in ("Equation:", "Source:", "Shapes:") if part not in text]
    assert not missing, f"{member.__qualname__} lacks {missing}"


PASSES = {step.__name__: step for step in (*passes.FORWARD, *passes.BACKWARD)}


@pytest.mark.parametrize("name", PASSES)
def test_passes_say_what_they_rewrite_and_keep(name: str) -> None:
    text = inspect.getdoc(PASSES[name]) or ""
    assert "rewrite:" in text and "keeps:" in text, f"{name}: {text!r}"


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name and line, number of lines) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_stay_short() -> None:
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > MAX_FILE}
    assert not long, f"over {MAX_FILE} lines: {long}"


def test_functions_stay_short() -> None:
    long = [f"{p.relative_to(ROOT)}:{name}, {n} lines" for p in FILES for name, n in functions(parsed(p)) if n > MAX_FUNCTION]
    assert not long, f"over {MAX_FUNCTION} lines:\n" + "\n".join(long)
