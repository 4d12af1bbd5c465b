"""The JSON Schema: committed and current, true to what io accepts, and open to kinds from other packages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import Field, field_validator
from ruamel.yaml import YAML

from memkit.specs import schema
from memkit.specs.bias import AttentionalBias
from memkit.specs.component import FAMILIES
from memkit.specs.document import PRESETS
from memkit.specs.errors import SpecError
from memkit.specs.gate import Gate, Input, Role
from memkit.specs.io import dump_yaml, load_spec, load_text, presets
from memkit.specs.layer import LayerSpec
from memkit.specs.retention import Retention


def committed() -> Any:
    return json.loads(schema.SCHEMA_FILE.read_text(encoding="utf-8"))


def test_the_committed_schema_is_current() -> None:
    assert schema.SCHEMA_FILE.read_text(encoding="utf-8") == schema.text(), "run: python -m memkit.specs.schema"


def test_the_schemas_are_valid_draft_2020_12() -> None:
    for found in (committed(), schema.generate(schema.registry())):
        assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        Draft202012Validator.check_schema(found)


@pytest.mark.parametrize("name", presets())
def test_presets_as_written_fit_the_committed_schema(name: str) -> None:
    raw = YAML(typ="safe", pure=True).load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    Draft202012Validator(committed()).validate(raw)
    full = YAML(typ="safe", pure=True).load(dump_yaml(load_spec(name), minimal=False))
    Draft202012Validator(committed()).validate(full)


@pytest.mark.parametrize(
    "data",
    [
        {"windw": 1},
        {"memory": "mpl"},
        {"memory": {"kind": "linear", "depth": 1}},
        {"window": {"size": 0}},
        {"bias": 3},
        {"retention": {"kind": "scalar", "gate": 1.5}},
        {"optimizer": {"kind": "gd", "step_size": {"kind": "learned", "start": -1}}},
        {"window": {"gate": "nonee"}},
        {"extends": 1},
        {"layer": {"output_gate": "yes"}},
    ],
)
def test_the_committed_schema_refuses(data: dict[str, Any]) -> None:
    assert not Draft202012Validator(committed()).is_valid(data)


def test_every_member_is_described_with_its_own_fields() -> None:
    definitions = committed()["$defs"]
    for family, root in FAMILIES.items():
        for kind, member in root.members.items():
            if not member.__module__.startswith("memkit.") or family == "gate":
                continue
            entry = definitions[f"{family}.{kind}"]
            assert set(entry["properties"]) == {"kind", *member.model_fields} and entry["additionalProperties"] is False
            assert entry["description"].startswith(str(member.__doc__).split("\n")[0])
            assert all("description" in field for name, field in entry["properties"].items() if name != "kind")
    top = committed()["properties"]
    assert set(top) == {"extends", *LayerSpec.model_fields} and all("description" in field for field in top.values())
    assert definitions["gate.step_size.input"]["properties"]["start"]["anyOf"][0] == {"type": "number", "minimum": 0.0}
    assert definitions["gate.retain"]["anyOf"][1] == {"type": "number", "minimum": 0.0, "maximum": 1.0}


# Kinds from other packages


@pytest.fixture
def outsiders() -> Iterator[None]:
    """Two kinds and a gate that another package might bring; gone after the test."""
    before = {family: dict(root.members) for family, root in FAMILIES.items()}

    class Cube(AttentionalBias):
        """The cube.

        Equation:  scale sum |r|^3
        """

        kind = "cube"
        scale: float = Field(default=1.0, gt=0, description="factor")
        parts: tuple[int, ...] = Field(default=(), max_length=3, description="three at most")

        @field_validator("scale")
        @classmethod
        def _even(cls, value: float) -> float:
            if value == 13:
                raise ValueError("13 is unlucky")
            return value

        def loss(self, prediction: Any, target: Any) -> Any:
            return self.scale * (prediction - target).abs().pow(3).sum()

    class Leaky(Retention):
        """Leaks.

        Equation:  a W
        """

        kind = "leaky"
        rate: Gate = Field(default=Input(), description="rate")
        name: str = Field(description="no default")
        gates = {"rate": Role("rate", low=-1.0, high=2.0)}  # noqa: RUF012

    class Clock(Gate):
        """By the clock.

        Equation:  sin t
        """

        kind = "clock"
        period: int = Field(default=8, ge=1, description="tokens")

    yield
    for family, root in FAMILIES.items():
        root.members.clear()
        root.members.update(before[family])


@pytest.mark.usefixtures("outsiders")
def test_an_imported_kind_is_accepted_and_checked() -> None:
    spec = load_text("bias: {kind: cube, scale: 2, parts: [1, 2]}\noptimizer: {kind: gd, step_size: clock}\n")
    assert spec.bias.model_dump() == {"kind": "cube", "scale": 2.0, "parts": (1, 2)}
    assert load_text(dump_yaml(spec)) == spec and "step_size: clock" in dump_yaml(spec)
    assert load_text("retention: {kind: leaky, rate: 1.5, name: a}\n").roles()["rate"][0].high == 2.0
    text = "bias: {kind: cube, scle: 2, parts: [1, 2, 3, 4]}\nretention: {kind: leaky, rate: 3}\nwindow: {gate: clok}\n"
    with pytest.raises(SpecError) as caught:
        load_text(text, "f.yaml")
    got = [(p.where, p.got, p.expected, p.hint) for p in caught.value.problems]
    assert ("f.yaml:1:20", "scle", "a field of cube: kind, scale, parts", "did you mean scale?") in got
    assert ("f.yaml:1:36", "parts: [1, 2, 3, 4]", "a list of 0 to 3 entries", "") in got
    assert ("f.yaml:2:32", "rate: 3", "a number from -1 to 2", "") in got
    assert ("f.yaml:2:12", "retention: {kind: leaky, rate: 3} without name", "the field name", "") in got
    assert any(p[0] == "f.yaml:3:16" and p[3] == "did you mean clock?" for p in got) and len(got) == 5


@pytest.mark.usefixtures("outsiders")
def test_a_plain_value_error_of_a_validator_keeps_its_place() -> None:
    with pytest.raises(SpecError) as caught:
        load_text("bias: {kind: cube, scale: 13}\nwindow: {size: 0}\n", "f.yaml")
    assert [(p.where, p.got, p.expected) for p in caught.value.problems] == [
        ("f.yaml:1:27", "scale: 13", "13 is unlucky"),
        ("f.yaml:2:16", "size: 0", "a whole number from 1 to 4096"),
    ]


@pytest.mark.usefixtures("outsiders")
def test_the_committed_schema_leaves_other_packages_out() -> None:
    assert schema.SCHEMA_FILE.read_text(encoding="utf-8") == schema.text()
    assert "bias.cube" in schema.generate(schema.registry())["$defs"]


def test_the_run_time_schema_forgets_a_kind_that_is_gone() -> None:
    """Runs after the tests that bring one."""
    with pytest.raises(SpecError, match="kind: cube"):
        load_text("bias: {kind: cube}\n")
