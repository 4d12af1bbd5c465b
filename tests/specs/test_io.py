"""Between YAML and specs: the round trip, extends, overrides, sources, and files that mean harm."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memkit.specs.bias import Huber
from memkit.specs.component import FAMILIES
from memkit.specs.document import MAX_BYTES, PRESETS, parse_text, parse_value
from memkit.specs.errors import SpecError
from memkit.specs.gate import Input, Number
from memkit.specs.io import MAX_EXTENDS, dump_yaml, load_spec, load_text, presets
from memkit.specs.layer import LayerSpec, Window
from memkit.specs.memory import Mlp


@contextmanager
def refused_quickly(part: str = "", seconds: float = 1.0) -> Iterator[None]:
    start = time.process_time()
    with pytest.raises(SpecError) as caught:
        yield
    assert time.process_time() - start < seconds
    assert part in str(caught.value)


# The round trip


def gates(low: float, high: float) -> st.SearchStrategy[Any]:
    number = st.floats(low, high, allow_subnormal=True)
    started = st.builds(lambda kind, start: {"kind": kind, "start": start}, st.sampled_from(["input", "learned"]), st.none() | number)
    return st.sampled_from(["input", "learned"]) | number | started


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Plain data of a whole spec: any kinds with any of their examples, any gates, any layer options, awkward text."""
    data: dict[str, Any] = {
        "name": draw(st.from_regex(r"\A[A-Za-z][A-Za-z0-9_-]{0,63}\Z")),
        "source": draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=60)),
    }
    for name in LayerSpec.COMPONENTS:
        kind = draw(st.sampled_from(sorted(k for k, m in FAMILIES[name].members.items() if m.__module__.startswith("memkit."))))
        member = FAMILIES[name].members[kind]
        section: dict[str, Any] = {"kind": kind, **draw(st.sampled_from(list(member.examples)))}
        for field, role in member.gates.items():
            section[field] = draw(gates(role.low, role.high or 10.0))
        data[name] = section
    data["window"] = {"size": draw(st.integers(1, 4096)), "gate": draw(gates(0.0, 1.0) | st.just("none"))}
    data["update"] = {"grad_at": draw(st.sampled_from(["token", "decayed", "chunk"])), "chunk_size": draw(st.integers(1, 65536))}
    data["layer"] = {
        "heads": draw(st.integers(1, 1024)),
        "key_dim": draw(st.none() | st.integers(1, 64)),
        "output_gate": draw(st.booleans()),
        "output_norm": draw(st.sampled_from(["none", "rms", "layer"])),
    }
    return data


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(data=specs(), minimal=st.booleans())
def test_dump_and_load_is_the_identity(data: dict[str, Any], minimal: bool) -> None:
    try:
        spec = load_spec(data)
    except SpecError:  # parts that do not fit together
        return
    text = dump_yaml(spec, minimal)
    assert load_text(text) == spec
    assert load_spec(spec) == spec
    assert load_spec(parse_text(text, "t").data) == spec
    assert dump_yaml(load_text(text), minimal) == text


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=80))
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    for candidate in (text, f"memory: {text}", f"source: {text}\n{text}: 1"):
        try:
            load_text(candidate)
        except SpecError as error:
            assert error.problems and all(p.got for p in error.problems)


@pytest.mark.parametrize("name", presets())
def test_presets_survive_the_round_trip(name: str) -> None:
    spec = load_spec(name)
    assert spec.name == name
    assert load_text(dump_yaml(spec)) == spec == load_text(dump_yaml(spec, minimal=False))
    assert (PRESETS / f"{name}.yaml").read_text().startswith("# yaml-language-server: $schema=../layer.schema.json\n")


def test_presets_are_in_order_and_complete() -> None:
    assert set(presets()) == {path.stem for path in PRESETS.glob("*.yaml")}
    assert presets()[0] == "linear_attention" and "atlas" in presets() and len(set(presets())) == len(presets())


def test_minimal_text_is_short() -> None:
    spec = load_text("name: a\nbias: {kind: l2}\nretention: {kind: scalar, gate: 0.5}\nwindow: {size: 1, gate: none}\n")
    assert dump_yaml(spec) == "name: a\nretention: {kind: scalar, gate: 0.5}\n"


@pytest.mark.parametrize("word", ["null", "true", "no", "on", "Null"])
def test_words_that_yaml_reads_otherwise_are_quoted(word: str) -> None:
    spec = load_spec({"name": word})
    assert f'name: "{word}"' in dump_yaml(spec) and load_text(dump_yaml(spec)).name == word


# The YAML we read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-0", 0),
        ("+7", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("010", 10),
        ("1.5", 1.5),
        ("-.5", -0.5),
        ("1e-3", 0.001),
        ("2.", 2.0),
        ("true", True),
        ("FALSE", False),
        ("yes", "yes"),
        ("~", None),
        ("", None),
        ("null", None),
        ("'1'", "1"),
        ("1_0", "1_0"),
        ("[1, a, {b: c}]", [1, "a", {"b": "c"}]),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("=", "="),
        ("'~'", "~"),
    ],
)
def test_core_schema_of_yaml_1_2(text: str, value: Any) -> None:
    read = parse_value(text, "t")
    assert read == value and type(read) is type(value)


def test_aliases_repeat_a_value_and_share_nothing() -> None:
    text = "optimizer: {kind: momentum, momentum: &g {kind: input, start: 0.5}, step_size: *g}\n"
    spec = load_text(text, overrides={"optimizer.step_size.start": 0.25})
    assert spec.optimizer.model_dump()["momentum"]["start"] == 0.5 and spec.optimizer.model_dump()["step_size"]["start"] == 0.25


def test_places_of_keys_and_values() -> None:
    document = parse_text("a:\n  - {b: 1}\n  - c\n", "f")
    assert document.where(("a", 0, "b")) == "f:2:9" and document.where(("a", 0, "b"), key=True) == "f:2:6"
    assert document.where(("a", 1)) == "f:3:5" and document.where(("a", 0, "nowhere")) == "f:2:5"


# Sources


def test_sources_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("\ufeffmemory: mlp\r\nwindow: {size: 3}\r\n", encoding="utf-8")
    Path("plain").write_text("memory: mlp\nwindow: {size: 3}\n")
    wanted = LayerSpec(memory=Mlp(), window=Window(size=3))
    as_dict = {"memory": Mlp(), "window": {"size": np.int64(3), "gate": np.float32(1)}}
    for source in ("a.yaml", "./a.yaml", Path("a.yaml"), Path("plain"), str(tmp_path / "a.yaml"), as_dict, wanted):
        assert load_spec(source) == wanted


def test_a_source_is_not_changed() -> None:
    source = {"extends": "atlas", "memory": {"depth": 3}}
    load_spec(source, {"memory.depth": 4, "window": {"size": 1}})
    assert source == {"extends": "atlas", "memory": {"depth": 3}}


# extends


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_extends_lays_fields_over_the_base(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, base="extends: atlas\nwindow: {size: 5}\nretention: scalar\n")
    write(tmp_path / "sub", top="extends: ../base.yaml\nmemory: {depth: 3}\nbias: {kind: huber}\nretention: {gate: 0.9}\n")
    spec, atlas = load_spec(tmp_path / "sub" / "top.yaml"), load_spec("atlas")
    assert spec.memory == atlas.memory.model_copy(update={"depth": 3}) and spec.bias == Huber()
    assert spec.window == Window(size=5, gate=atlas.window.gate) and spec.optimizer == atlas.optimizer
    assert spec.retention.model_dump()["gate"] == {"kind": "number", "value": 0.9} and spec.name == "atlas"


def test_a_component_with_its_kind_replaces_that_of_the_base() -> None:
    assert load_text("extends: atlas\nmemory: {kind: mlp, depth: 3}\n").memory == Mlp(depth=3)
    assert load_text("extends: atlas\nmemory: mlp\n").memory == Mlp()
    assert load_text("extends: atlas\noptimizer: {momentum: {start: 0.7}}\n").roles()["momentum"][1] == Input(start=0.7)


def test_circles_and_long_lines_of_extends(tmp_path: Path) -> None:
    write(tmp_path, a="extends: b.yaml\n", b="extends: a.yaml\n", own="extends: own.yaml\n")
    write(tmp_path, **{f"d{i}": f"extends: d{i + 1}.yaml\n" for i in range(30)}, ok="memory: mlp\n")
    with refused_quickly("a circle of extends: a.yaml -> b.yaml -> a.yaml"):
        load_spec(tmp_path / "a.yaml")
    with refused_quickly("a circle of extends: own.yaml -> own.yaml"):
        load_spec(tmp_path / "own.yaml")
    with refused_quickly(f"extends more than {MAX_EXTENDS} files deep"):
        load_spec(tmp_path / "d0.yaml")
    write(tmp_path, d5="extends: ok.yaml\n")
    assert load_spec(tmp_path / "d0.yaml").memory == Mlp()


# Overrides


def test_overrides_of_fields_sections_and_gates() -> None:
    overrides = {"window.size": 1, "memory": "linear", "bias": {"kind": "huber", "delta": 0.1}, "retention.gate": 0.9}
    spec, atlas = load_spec("atlas", overrides), load_spec("atlas")
    assert spec.window == Window(size=1, gate=atlas.window.gate) and spec.memory.kind == "linear" and spec.bias == Huber(delta=0.1)
    assert spec.roles()["retain"][1] == Number(value=0.9) and spec.optimizer == atlas.optimizer
    assert load_spec("atlas", {"bias": Huber(delta=0.1)}).bias == Huber(delta=0.1)


def test_an_override_of_a_section_replaces_it_and_of_a_field_expands_it() -> None:
    assert load_spec("atlas", {"window": {"size": 2}}).window == Window(size=2)
    assert load_text("bias: huber\n", overrides={"bias.delta": 0.5}).bias == Huber(delta=0.5)
    assert load_spec({}, {"layer.heads": 2, "window.size": 3}).layer.heads == 2
    assert load_text("retention: scalar\n", overrides={"retention.gate.start": 0.7}).roles()["retain"][1] == Input(start=0.7)
    muon = load_text("optimizer: muon\n", overrides={"optimizer.step_size.kind": "learned"})
    step = muon.optimizer.model_dump()["step_size"]
    assert (step["kind"], step["start"]) == ("learned", 0.02)


@pytest.mark.parametrize("none", ["none", None, 1, 1.0, {"kind": "number", "value": 1}])
def test_a_window_gate_of_none_weighs_all_one(none: Any) -> None:
    assert load_spec("atlas", {"window.gate": none}).window.gate == Number(value=1.0)


def test_another_kind_keeps_the_fields_it_has_too() -> None:
    gd = load_spec({"optimizer": {"kind": "muon", "steps": 3, "step_size": 0.5, "momentum": 0.1}}, {"optimizer.kind": "gd"})
    assert gd.optimizer.model_dump() == {"kind": "gd", "step_size": {"kind": "number", "value": 0.5}}


def test_the_order_of_overrides_does_not_count() -> None:
    items = [("memory.depth", 3), ("memory.kind", "mlp"), ("memory", "linear"), ("memory.residual", True)]
    assert load_spec("atlas", dict(items)).memory == load_spec("atlas", dict(reversed(items))).memory == Mlp(depth=3, residual=True)


def test_a_field_given_with_another_kind_must_belong_to_it() -> None:
    with pytest.raises(SpecError, match="steps"):
        load_spec("atlas", {"optimizer.kind": "gd", "optimizer.steps": 3})


# Files that mean harm


def bomb() -> str:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi")]
    return "\n".join(lines)


K = 1024
HOSTILE = {
    "alias bomb": (bomb(), "more than 5000 values"),
    "10 MB": ("x: " + "y" * 10 * K * K, "more than 128 KiB"),
    "deep flow": ("a: " + "[" * 100 * K, "more than 20 levels"),
    "deep mappings": ("a: " + "{a: " * 25 * K, "more than 20 levels"),
    "deep blocks": ("".join(" " * i + "a:\n" for i in range(400)), "more than 20 levels"),
    "deep dashes": ("- " * 50 * K, "more than 20 levels"),
    "deep questions": ("? " * 50 * K, "more than 20 levels"),
    "flow keys": ("{? " * 1000, "more than 20 levels"),
    "wide list": ("a: [" + "1," * 60 * K + "]", "more than 5000 values"),
    "many keys": ("".join(f"k{i}: 1\n" for i in range(12000)), "more than 5000 values"),
    "many anchors": ("".join(f"k{i}: &a{i} 1\n" for i in range(7000)), "more than 5000 values"),
    "unknown keys": ("".join(f"k{i}: 1\n" for i in range(2400)), "100 mistakes"),
    "long words": ("source: " + "w " * 60 * K, "text of 0 to 4000 characters"),
    "long lines": ("source:\n" + " b\n" * 40 * K, "text of 0 to 4000 characters"),
    "blank lines": ("\n" * 125 * K + "a: 1", "a field of spec"),
    "literal": ("source: |\n" + " b\n" * 40 * K, "text of 0 to 4000 characters"),
    "escapes": ('source: "' + "\\n" * 60 * K + '"', "text of 0 to 4000 characters"),
    "quotes": ('"' * 125 * K, "YAML"),
    "colons": ("a:" * 60 * K, "YAML"),
    "long key": ("x" * 125 * K + ": 1", "YAML"),
    "comments": ("#" * 127 * K, "an empty file"),
    "brackets": ("]" * 1000, "YAML"),
    "directives": ("%TAG ! tag:x,2000:\n" * 3000, "YAML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_within_a_second(name: str) -> None:
    text, part = HOSTILE[name]
    with refused_quickly(part):
        load_text(text, "f.yaml")


def test_no_tag_runs_code(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for tag in ("!!python/object/apply:os.system", "!!python/object/new:os.system", "!<tag:yaml.org,2002:python/name:os.system>"):
        with refused_quickly("the tag"):
            load_text(f"source: {tag} ['touch {mark}']\n")
    assert not mark.exists()


def test_hostile_files(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "utf16.yaml").write_bytes("memory: linear".encode("utf-16"))
    (tmp_path / "latin.yaml").write_bytes("source: caf\xe9".encode("latin1"))
    (tmp_path / "zeros.yaml").write_bytes(bytes(1000))
    (tmp_path / "big.yaml").write_bytes(b"a: 1\n" * (2 * K * K))
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    parts = {
        "folder": "is a directory",
        "binary": "byte 0x80 at offset 128",
        "utf16": "byte 0xff at offset 0",
        "latin": "byte 0xe9 at offset 11",
        "zeros": "a character that YAML does not allow",
        "big": f"more than {MAX_BYTES // K} KiB",
        "pipe": "is no regular file",
        "loop": "cannot be read",
        "missing": "no file",
    }
    for name, part in parts.items():
        with refused_quickly(part):
            load_spec(tmp_path / f"{name}.yaml")
        with refused_quickly(part):
            load_spec({"extends": str(tmp_path / f"{name}.yaml")})
    (tmp_path / "cut.yaml").write_text(f"#{'é' * MAX_BYTES}", encoding="utf-8")  # the limit falls inside a character
    with refused_quickly("KiB"):
        load_spec(tmp_path / "cut.yaml")
    with refused_quickly("is no regular file"):
        load_spec(Path("/dev/zero"))


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text("memory: linear\n")

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # the tests may run as root, whom no mode keeps out
    with refused_quickly("cannot be read: Permission denied"):
        load_spec(path)


def test_python_data_without_end() -> None:
    circle: dict[str, Any] = {}
    circle["memory"] = circle
    with refused_quickly("more than 20 levels"):
        load_spec(circle)
    with refused_quickly("more than 5000 values"):
        load_spec({"memory": {"kind": "chain", "steps": [{"linear": 1}] * 10000}})
    with refused_quickly("more than 20 levels"):
        load_spec("atlas", {"memory": circle})
