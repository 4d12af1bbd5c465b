"""A row for every message a spec can cause: the text, where it points, what it says was got and expected, and the fix it names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from memkit.specs.errors import MAX_SHOWN, MemkitError, ShapeError, SpecError, near
from memkit.specs.formula import Formula
from memkit.specs.io import load_spec, load_text
from memkit.specs.python_data import from_python

# name: (yaml, place, got, expected, try); got, expected and try are parts that the message must hold, in full if they start with =
YAML: dict[str, tuple[str, str, str, str, str]] = {
    "unknown field": ("windw: {size: 2}\n", "1:1", "=windw", "a field of spec: extends, name,", "=did you mean window?"),
    "unknown field of a kind": (
        "bias: {kind: huber, dleta: 1}\n",
        "1:21",
        "=dleta",
        "=a field of huber: kind, delta",
        "=did you mean delta?",
    ),
    "field of another kind": (
        "memory:\n  kind: linear\n  depth: 2\n",
        "3:3",
        "=depth",
        "a field of linear: kind,",
        "=depth is a field of mlp",
    ),
    "field of a section": ("heads: 3\n", "1:1", "=heads", "a field of spec", "=layer: {heads: ...}"),
    "field of window": ("window: {sise: 3}\n", "1:10", "=sise", "=a field of window: size, gate", "=did you mean size?"),
    "field of a gate": (
        "retention: {kind: scalar, gate: {kind: input, strt: 0.5}}\n",
        "1:47",
        "=strt",
        "=a field of input: kind, start, ceiling",
        "did you mean start?",
    ),
    "dotted key": ("retention.gate: 1\n", "1:1", "=retention.gate", "a field of spec", "did you mean retention?"),
    "unknown bare kind": (
        "name: x\nmemory: mpl\n",
        "2:9",
        "=memory: mpl",
        "one of chain, gated_mlp, linear, mlp, or {kind:",
        "=did you mean mlp?",
    ),
    "unknown kind": (
        "memory: {kind: gatedmlp}\n",
        "1:16",
        "=kind: gatedmlp",
        "=one of chain, gated_mlp, linear, mlp",
        "did you mean gated_mlp?",
    ),
    "kind in capitals": ("bias: L2\n", "1:7", "=bias: L2", "one of dot, expression, huber, l2, lq", "=did you mean l2?"),
    "kind missing": ("memory: {depth: 3}\n", "1:9", "=memory: {depth: 3} without kind", "kind: one of chain", "={kind: mlp, ...}"),
    "kind of wrong type": ("bias: {kind: 3}\n", "1:14", "=kind: 3", "=one of dot, expression, huber, l2, lq", ""),
    "section empty": ("memory:\nname: x\n", "2:1", "=memory: null", "one of chain, gated_mlp, linear, mlp, or {kind: ...}", ""),
    "section of wrong type": ("window: 4\n", "1:9", "=window: 4", "=a mapping with size, gate", ""),
    "list for a component": ("bias: [l2]\n", "1:7", "=bias: [l2]", "one of dot,", ""),
    "number for a component": ("features: 3\n", "1:11", "=features: 3", "one of elementwise, elu1,", ""),
    "below the range": ("window: {size: 0}\n", "1:16", "=size: 0", "=a whole number from 1 to 4096", ""),
    "above the range": ("memory: {kind: mlp, depth: 99}\n", "1:28", "=depth: 99", "=a whole number from 1 to 8", ""),
    "open range": ("bias: {kind: huber, delta: 0}\n", "1:28", "=delta: 0", "=a number > 0", ""),
    "no whole number": ("window: {size: 1.5}\n", "1:16", "=size: 1.5", "=a whole number from 1 to 4096", ""),
    "quoted number": ("window: {size: '4'}\n", "1:16", "=size: '4'", "a whole number", "=4"),
    "number with _": ("update: {chunk_size: 1_024}\n", "1:22", "1_024", "a whole number from 1 to 65536", "=1024"),
    "yes": ("layer: {output_gate: yes}\n", "1:22", "=output_gate: yes", "=true or false", "=true"),
    "number for a word": ("update: {grad_at: 3}\n", "1:19", "=grad_at: 3", "one of token, decayed, chunk", ""),
    "unknown word": ("update: {grad_at: chunks}\n", "1:19", "=grad_at: chunks", "=one of token, decayed, chunk", "=did you mean chunk?"),
    "bad name": ("name: ../x\n", "1:7", "=name: '../x'", "letters, digits, _ and -", ""),
    "gate out of range": ("retention: {kind: scalar, gate: 1.5}\n", "1:33", "=gate: 1.5", "=a number from 0 to 1", ""),
    "negative step": ("optimizer: {kind: gd, step_size: -0.1}\n", "1:34", "=step_size: -0.1", "=a number >= 0", ""),
    "start out of range": ("optimizer: {kind: gd, step_size: {kind: input, start: -1}}\n", "1:55", "=start: -1", "a number >= 0", ""),
    "unknown gate": (
        "optimizer: {kind: gd, step_size: inptu}\n",
        "1:34",
        "=step_size: inptu",
        "=one of input, learned, or a number >= 0, or {kind: ...}",
        "input?",
    ),
    "window gate": (
        "window: {size: 2, gate: nonee}\n",
        "1:25",
        "=gate: nonee",
        "one of input, learned, none, or a number from 0 to 1",
        "none?",
    ),
    "true for a gate": ("retention: {kind: scalar, gate: true}\n", "1:33", "=gate: true", "one of input, learned, or a number", ""),
    "formula function": ("bias:\n  kind: expression\n  formula: foo(r)\n", "3:12", "'foo' at column 1", "numbers, r, pi", ""),
    "formula name": ("bias: {kind: expression, formula: lgo(r)}\n", "1:35", "a function 'lgo'", "log1p", "=did you mean log?"),
    "formula constant": ("bias: {kind: expression, formula: 1/0 + r}\n", "1:35", "a constant without a finite value", "finite numbers", ""),
    "formula not finite": ("bias: {kind: expression, formula: log(r)}\n", "1:35", "is nan at r = -3", "finite for every r", "1e-6"),
    "formula without r": ("bias: {kind: expression, formula: '2'}\n", "1:35", "'2' without r", "in r = prediction - target", "0.5*r^2"),
    "formula too long": (f"bias: {{kind: expression, formula: {'r+' * 300}r}}\n", "1:35", "formula: r+", "text of 1 to 500 characters", ""),
    "chain step": (
        "memory:\n  kind: chain\n  steps:\n  - {linear: 1}\n  - {nrm: rms}\n",
        "5:5",
        "'nrm'",
        "linear, activation, norm or skip",
        "norm?",
    ),
    "chain without steps": ("memory: {kind: chain, steps: []}\n", "1:30", "=steps: []", "=a list of 1 to 64 entries", ""),
    "channel with mlp": (
        "memory: mlp\nretention: channel\n",
        "2:12",
        "retention: channel with memory: mlp",
        "one column a feature",
        "retention: scalar",
    ),
    "kernel with muon": (
        "features: exponential\noptimizer: muon\n",
        "2:12",
        "with optimizer: muon",
        "linear in the gradient",
        "optimizer: momentum",
    ),
    "kernel with channel": (
        "features: exponential\nretention: channel\n",
        "2:12",
        "with retention: channel",
        "scalar",
        "retention: scalar",
    ),
    "residual": (
        "memory: {kind: mlp, residual: true}\nlayer: {key_dim: 8, value_dim: 4}\n",
        "1:31",
        "residual: true with key_dim 8 and value_dim 4",
        "=key_dim = value_dim",
        "=residual: false",
    ),
    "duplicate": ("memory: linear\nbias: l2\nmemory: mlp\n", "3:1", "=memory a second time", "the first is at f.yaml:1:1", "remove one"),
    "duplicate inside": ("window: {size: 1, size: 2}\n", "1:19", "=size a second time", "the first is at f.yaml:1:10", ""),
    "not a number": ("bias: {kind: huber, delta: .nan}\n", "1:28", "=.nan", "=a finite number", ""),
    "infinite": ("bias: {kind: huber, delta: -.INF}\n", "1:28", "=-.INF", "=a finite number", ""),
    "overflow": ("bias: {kind: huber, delta: 1e999}\n", "1:28", "=1e999", "=a finite number", ""),
    "many digits": (f"window: {{size: {'9' * 5000}}}\n", "1:16", "a number of 5000 characters", "at most 40", ""),
    "key is a number": ("1: linear\n", "1:1", "=the key 1", "=a key that is a word", ""),
    "key is null": ("~: linear\n", "1:1", "=the key null", "a key that is a word", ""),
    "key is a list": ("? [memory]\n: linear\n", "1:3", "=the key [memory]", "a key that is a word", ""),
    "tag": ("memory: !!python/object/apply:os.getcwd []\n", "1:9", "the tag tag:yaml.org,2002:python", "without tags", "remove the tag"),
    "own tag": ("memory: !mine linear\n", "1:9", "=the tag !mine", "without tags", ""),
    "merge key": ("<<: {memory: linear}\n", "1:1", "=the merge key <<", "plain keys", "extends"),
    "alias": ("memory: *m\n", "1:9", "=the alias *m", "an anchor that stands before it", ""),
    "alias to itself": ("memory: &m {kind: *m}\n", "1:19", "=the alias *m", "outside it", ""),
    "surrogate": ('source: "\\ud800"\n', "1:9", "ud800", "surrogate", ""),
    "second document": ("memory: mlp\n---\nmemory: linear\n", "2:1", "=a second document", "one spec a file", "---"),
    "empty": ("", "1:1", "=an empty file", "a mapping", "memkit new"),
    "only a comment": ("# nothing\n", "1:1", "=an empty file", "a mapping", ""),
    "null": ("~\n", "1:1", "=an empty file", "a mapping", ""),
    "list": ("- memory: linear\n", "1:1", "a list at the top level", "a mapping", ""),
    "scalar": ("linear\n", "1:1", "=linear", "a mapping", ""),
    "unclosed": ("memory: {kind: mlp\n", "2:1", "expected ',' or '}'", "YAML", ""),
    "tab": ("memory:\n\tkind: mlp\n", "2:1", "cannot start any token", "YAML", ""),
    "control character": ("memory: li\x07near\n", "1:11", "a character that YAML does not allow", "printable", ""),
    "unknown base": ("extends: atls\n", "1:10", "=no preset atls", "a preset (linear_attention,", "=did you mean atlas?"),
    "base out of reach": (
        "extends: ../../etc/passwd\n",
        "1:10",
        "no preset '../../etc/passwd'",
        "a preset",
        "a path to a file ends with .yaml",
    ),
    "missing base": ("extends: nowhere.yaml\n", "1:10", "=no file nowhere.yaml", "a YAML file that exists", ""),
    "base of wrong type": ("extends: [atlas]\n", "1:10", "=extends: [atlas]", "a preset name or a file", ""),
}

# name: (source, overrides, where, got, expected, try)
PYTHON: dict[str, tuple[Any, Any, str, str, str, str]] = {
    "dict": ({"window": {"size": 0}}, None, "window.size", "=size: 0", "a whole number from 1 to 4096", ""),
    "dict field": ({"windw": 1}, None, "windw", "=windw", "a field of spec", "=did you mean window?"),
    "dict deep field": (
        {"retention": {"kind": "scalar", "gate": {"kind": "input", "strt": 1}}},
        None,
        "retention.gate.strt",
        "=strt",
        "start",
        "",
    ),
    "dict validator": ({"bias": {"kind": "expression", "formula": "x"}}, None, "bias.formula", "'x' at column 1", "numbers, r", ""),
    "dict over a base": ({"extends": "atlas", "memory": {"depth": 99}}, None, "memory.depth", "=depth: 99", "from 1 to 8", ""),
    "dict nan": ({"window": {"size": float("nan")}}, None, "window.size", "nan", "a finite number", ""),
    "dict key": ({1: 2}, None, "", "=the key 1", "strings", ""),
    "dict value": ({"memory": object()}, None, "memory", "=a value of type object", "mappings or components", ""),
    "dict digits": ({"window": {"size": 10**5000}}, None, "window.size", "more than 40 digits", "a smaller number", ""),
    "dict surrogate": ({"source": "\ud800"}, None, "source", "ud800", "surrogate", ""),
    "no source": (3, None, "source", "=a value of type int", "a preset name, a path, a mapping or a LayerSpec", ""),
    "bytes": (b"atlas", None, "source", "=a value of type bytes", "a preset name", ""),
    "preset": ("atlass", None, "source", "=no preset atlass", "a preset (linear_attention,", "=did you mean atlas?"),
    "preset with slash": ("../atlas", None, "source", "no preset '../atlas'", "a preset", "no slashes and no dots"),
    "preset dots": ("..", None, "source", "no preset", "a preset", "no slashes and no dots"),
    "yaml text": ("memory: linear", None, "source", "no preset", "a preset", "looks like YAML text"),
    "null byte": ("a\0.yaml", None, "'a\\x00.yaml'", "cannot be read", "a readable YAML file", ""),
    "long name": ("a" * 5000 + ".yaml", None, repr("a" * 60), "cannot be read", "a readable YAML file", ""),
    "override path": ("atlas", {"windw.size": 1}, "windw.size", "=windw.size", "a path that starts with name,", "=did you mean window?"),
    "override too deep": (
        "atlas",
        {"window.size.x": 1},
        "window.size.x",
        "=window.size.x",
        "a path into a section",
        "window.size has no fields",
    ),
    "override in a list": ("atlas", {"memory.steps.0": 1}, "memory.steps.0", "=memory.steps.0", "a path into a section", ""),
    "override empty": ("atlas", {"": 1}, "", "", "a path that starts with", ""),
    "override value": ("atlas", {"window.size": 0}, "window.size", "=size: 0", "from 1 to 4096", ""),
    "override kind": ("atlas", {"memory.kind": "lineer"}, "memory.kind", "=kind: lineer", "one of", "=did you mean linear?"),
    "override field": ("atlas", {"memory.dpth": 1}, "memory.dpth", "=dpth", "a field of mlp", "=did you mean depth?"),
    "override section": (
        "atlas",
        {"memory": {"depth": 3}},
        "memory",
        "=memory: {depth: 3} without kind",
        "kind: one of",
        "={kind: mlp, ...}",
    ),
    "override extends": ("atlas", {"extends": "gla"}, "extends", "=extends", "a path that starts with", ""),
    "override infinite": ("atlas", {"window.gate": float("inf")}, "window.gate", "inf", "a finite number", ""),
    "overrides list": ("atlas", ["window.size"], "overrides", "=overrides of type list", "a mapping", ""),
    "override misfit": (
        "atlas",
        {"retention": "channel"},
        "retention",
        "retention: channel with memory: mlp",
        "one column",
        "retention: scalar",
    ),
}


def check(problem: MemkitError, got: str, expected: str, hint: str) -> None:
    for found, wanted in ((problem.got, got), (problem.expected, expected), (problem.hint, hint)):
        assert found == wanted[1:] if wanted.startswith("=") else wanted in found, (found, wanted)


@pytest.mark.parametrize("name", YAML)
def test_yaml_message(name: str) -> None:
    text, place, got, expected, hint = YAML[name]
    with pytest.raises(SpecError) as caught:
        load_text(text, "f.yaml")
    first = caught.value.problems[0]
    assert first.where == f"f.yaml:{place}"
    check(first, got, expected, hint)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", PYTHON)
def test_python_message(name: str) -> None:
    source, overrides, where, got, expected, hint = PYTHON[name]
    with pytest.raises(SpecError) as caught:
        load_spec(source, overrides)
    assert len(caught.value.problems) == 1
    assert caught.value.where == where
    check(caught.value, got, expected, hint)


def test_all_mistakes_at_once_in_the_order_of_the_file() -> None:
    text = "windw: 3\nbias: {kind: expression, formula: foo(r)}\nwindow: {size: 0, gate: 3}\nmemory: {kind: mpl}\n"
    with pytest.raises(SpecError) as caught:
        load_text(text, "f.yaml")
    assert [p.where for p in caught.value.problems] == [f"f.yaml:{p}" for p in ("1:1", "2:35", "3:16", "3:25", "4:16")]
    assert str(caught.value).startswith("5 mistakes\nSpecError at f.yaml:1:1\n  got       windw\n  expected  a field of spec")


def test_cross_field_mistakes_come_together() -> None:
    with pytest.raises(SpecError) as caught:
        load_text("features: exponential\nretention: channel\noptimizer: muon\n", "f.yaml")
    assert [p.where for p in caught.value.problems] == ["f.yaml:2:12", "f.yaml:3:12"]


def test_mistakes_in_a_base_and_over_it_keep_their_files(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("memory: {kind: mlp, depth: 0}\nwindow: {size: 2}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\nwindow: {gate: 7}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "top.yaml", {"update.chunk_size": 0})
    assert {p.where for p in caught.value.problems} == {
        f"{tmp_path / 'base.yaml'}:1:28",
        f"{tmp_path / 'top.yaml'}:2:16",
        "update.chunk_size",
    }


def test_an_error_in_python_data_lists_all() -> None:
    with pytest.raises(SpecError) as caught:
        from_python({"a": float("inf"), "b": {2: 3, "c": object()}})
    assert [p.where for p in caught.value.problems] == ["a", "b", "b.c"]


def test_a_long_list_of_mistakes_is_cut() -> None:
    text = "".join(f"k{i}: 1\n" for i in range(50))
    with pytest.raises(SpecError) as caught:
        load_text(text, "f.yaml")
    assert str(caught.value).count("SpecError at") == MAX_SHOWN and str(caught.value).endswith(f"and {50 - MAX_SHOWN} more")


def test_error_text_and_order() -> None:
    error = ShapeError("k [2, 3]", "[B, T, H, K]", "k.unsqueeze(0)", "rule")
    assert str(error) == "ShapeError at rule\n  got       k [2, 3]\n  expected  [B, T, H, K]\n  try       k.unsqueeze(0)"
    moved = error.at("layer")
    assert isinstance(moved, ShapeError) and moved.where == "layer" and moved.got == error.got


def test_errors_survive_pickling_and_moving() -> None:
    several = SpecError.several([SpecError("a", where="x"), SpecError("b")])
    again = pickle.loads(pickle.dumps(several))
    assert str(again) == str(several) and len(again.problems) == 2
    assert [p.where for p in several.at("here").problems] == ["x", "here"]
    for kind in (SpecError, ShapeError):
        again = pickle.loads(pickle.dumps(kind("a", "b", "c", "d")))
        assert type(again) is kind and str(again) == str(kind("a", "b", "c", "d"))


def test_near_names() -> None:
    assert near("windw", ["window", "update"]) == "did you mean window?"
    assert near("L2", ["l2"]) == "did you mean l2?"
    assert near("zzz", ["window"]) == ""


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9",
        "1/0*r",
        "(-8)^(1/3)+r",
        "1e999*r",
        "0^-1+r",
        "log(0)+r",
        "9" * 400 + "*r",
        "٣*r",
        "r×2",
        "r\u00a0+1",
        "é",
        "",
        " ",
        "r r",
        "r+" * 150 + "r",
        "r+" * 100_000,
        "(" * 60 + "r" + ")" * 60,
        "-" * 400 + "r",
        "r^" * 60 + "2",
        "__import__('os')",
        "r.real",
        "r[0]",
        "r" + " " * 600 + "+1",
        "lambda",
        "max(r)",
        "max(r,1,2)",
        "sin()",
        "sin",
        "r(2)",
        "exp(exp(exp(r)))",
        "r = 2",
        "r;r",
        "r if r else r",
        "'r'",
        "3",
        "r^r",
        "1/r",
    ],
)
def test_formula_refuses(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Formula(text)
    assert caught.value.where == "bias.formula" and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "text",
    [
        "r",
        "0.5*r^2",
        "log(cosh(r))",
        "max(abs(r), 2^0.5) - pi/3",
        "r+" * 99 + "r",
        "-r**2/2",
        "+-+r",
        ".5e-3*r",
    ],
)
def test_formula_accepts(text: str) -> None:
    assert str(Formula(text)) == text


def test_ceiling_of_a_gate() -> None:
    with pytest.raises(SpecError, match=r"(?s)optimizer.step_size.ceiling.*ceiling 0.1 with start 0.5.*start: 0.05"):
        load_spec({"optimizer": {"kind": "gd", "step_size": {"kind": "input", "start": 0.5, "ceiling": 0.1}}})
    with pytest.raises(SpecError, match=r"(?s)retention.gate.ceiling.*retain ends at 1 anyway"):
        load_spec({"retention": {"kind": "scalar", "gate": {"kind": "input", "ceiling": 0.5}}})
