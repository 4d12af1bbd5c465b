"""The explorer: what it is built from, and the page itself in a real browser."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import memkit
from memkit import drawing_dot, drawing_files
from memkit.drawing import VIEWS, visualize
from memkit.equations import equation_of
from memkit.explorer import explorer
from memkit.explorer.knobs import FIELDS, settings, turns
from memkit.explorer.mathml import equations, math
from memkit.explorer.reductions import Reductions

from .browser import Browser, missing, without_font

NAMES = ("linear_attention", "deltanet", "swla")
BROWSER = missing()
FONT = without_font()
pytestmark = pytest.mark.skipif(drawing_dot.program("svg") is None, reason="neither dot nor graphviz-pure is here")


@pytest.fixture(scope="module")
def page() -> str:
    return explorer("swla", NAMES, progress=False)


@pytest.fixture(scope="module")
def data(page: str) -> dict[str, Any]:
    packed = re.search(r'<script id="data" type="text/plain">([^<]*)<', page)
    assert packed is not None
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


def text(data: dict[str, Any], number: int) -> str:
    return "\n".join(data["lines"][line] for line in data["texts"][number])


class TestData:
    def test_every_preset_and_every_knob_is_there(self, data: dict[str, Any]) -> None:
        assert [preset["name"] for preset in data["presets"]] == list(NAMES)
        assert data["start"] == 2
        for preset in data["presets"]:
            spec = memkit.spec(preset["name"])
            assert preset["settings"] == settings(spec)
            found = {(turn.path, turn.value) for turn in turns(spec)}
            assert found == {(path, value) for path, values in preset["turns"].items() for value in values}
            assert {path for path, _ in found} >= {"features", "memory", "bias", "window.size", "retention", "optimizer", "update.grad_at"}
            assert {path for path, _ in found} <= set(FIELDS)

    def test_texts_are_what_memkit_says(self, data: dict[str, Any]) -> None:
        for preset in data["presets"]:
            config = data["configs"][preset["config"]]
            rule = memkit.compile(preset["name"], key_dim=data["width"], value_dim=data["width"])
            assert text(data, config["source"]) == "\n".join(rule.source.splitlines())
            assert text(data, config["plan"]) == "\n".join(rule.explain().splitlines())  # type: ignore[attr-defined]
            ElementTree.fromstring(text(data, config["rule"]))

    def test_refusals_are_the_specs_own(self) -> None:
        refused = {(turn.path, turn.value): turn.error for turn in turns(memkit.spec("gla")) if turn.spec is None}
        assert "SpecError at retention" in refused["memory", "mlp"]

    def test_a_turned_knob_keeps_what_both_kinds_have(self) -> None:
        turned = {turn.value: turn.spec for turn in turns(memkit.spec("deltanet")) if turn.path == "optimizer"}
        momentum = turned["momentum"]
        assert momentum is not None
        assert momentum.optimizer.model_dump()["step_size"]["start"] == 0.5

    def test_a_spec_that_is_no_preset_comes_first(self) -> None:
        class Stop(Exception):
            pass

        own = memkit.spec({"extends": "deltanet", "name": "mine", "window": {"size": 2}})
        from memkit.explorer import build

        class Seen(build.Builder):
            def build(self, specs: list[Any], *, progress: bool = True) -> dict[str, Any]:
                raise Stop([spec.name for spec in specs])

        import memkit.explorer as module

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop) as stop:
            patch.setattr(module, "Builder", Seen)
            explorer(own, ("deltanet",), progress=False)
        assert stop.value.args[0] == ["mine", "deltanet"]

    @pytest.mark.parametrize("show, terminal, wanted", [(True, True, r"2/2.*/min.*left"), (True, False, "2 specs"), (False, True, "^$")])
    def test_progress(
        self, show: bool, terminal: bool, wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from memkit.explorer import build

        monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
        monkeypatch.setenv("COLUMNS", "120")
        with build._bar(show, 2) as step:
            step()
            step()
        said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
        assert re.search(wanted, said)

    def test_size_and_nothing_fetched(self, page: str) -> None:
        assert len(page) < 1_000_000
        assert not re.search(r'(?:src|href)="(?!#|data:)', page)
        assert "http" not in re.sub(r"http://www\.w3\.org/[\w/]+", "", page.partition('<script id="data"')[0])


@pytest.fixture(scope="module")
def known() -> Reductions:
    return Reductions(memkit.presets())


class TestReductions:
    @pytest.mark.parametrize(
        "name, overrides, wanted",
        [
            ("gla", {}, {"linear_attention": {"gates.retain": 1}}),
            ("gated_deltanet", {}, {"deltanet": {"gates.retain": 1}}),
            ("titans_linear", {}, {"deltanet": {"gates.momentum": 0, "gates.retain": 1}}),
            ("swla", {}, {"retnet": {"window.size": 1}, "linear_attention": {"window.size": 1, "gates.retain": 1}}),
            ("deltanet", {"bias": "dot"}, {"linear_attention": {"gates.step_size": 1}}),
            ("deltanet", {"update.grad_at": "decayed"}, {"deltanet": {}}),
            ("linear_attention", {"bias": "huber"}, {}),
            ("deltanet", {"update.read": "before"}, {}),
        ],
    )
    def test_known_ones(self, known: Reductions, name: str, overrides: dict[str, Any], wanted: dict[str, Any]) -> None:
        assert dict(known.of(memkit.spec(name, overrides), "" if overrides else name)) == wanted


class TestMath:
    def test_every_preset_gives_well_formed_markup(self) -> None:
        for name in memkit.presets():
            lines = equation_of(memkit.spec(name)).splitlines()
            root = ElementTree.fromstring(equations("\n".join(lines)).replace("&#160;", " "))
            assert len(root) == 2 * len(lines)

    @pytest.mark.parametrize(
        "ascii_text, wanted",
        [
            ("W_{t-1}", "<msub><mi>W</mi><mrow><mi>t</mi>"),
            ("||p||^2", "<msup>"),
            ("sum_{i=t-7..t} x", "<munder><mo>\u2211</mo>"),
            ("grad_W loss(p, v)", "<msub><mo>\u2207</mo>"),
            ("step_size_t", "<msub><mi>step_size</mi>"),
            ("a < b", "&lt;"),
            ("NS5(S_t)", "<msub><mi>NS</mi><mrow><mn>5</mn>"),
        ],
    )
    def test_pieces(self, ascii_text: str, wanted: str) -> None:
        assert wanted in math(ascii_text)


@pytest.fixture(scope="module")
def address(page: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "explorer.html"
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


@pytest.mark.skipif(bool(BROWSER), reason=BROWSER)
class TestPage:
    @pytest.fixture(params=[(1280, 900, False), (390, 844, True)], ids=["desktop", "phone-dark"])
    def browser(self, request: pytest.FixtureRequest, tmp_path: Path, address: str) -> Iterator[Browser]:
        width, height, dark = request.param
        with Browser(tmp_path / "profile", (width, height), dark) as browser:
            browser.open(address, "document.documentElement.dataset.ready === 'yes'")
            yield browser
            shots = os.environ.get("MEMKIT_SCREENSHOTS")
            if shots:
                browser.screenshot(Path(shots) / f"explorer-{width}.png")
            assert browser.errors() == []

    def shown(self, browser: Browser, query: str) -> str:
        return browser.run("return document.querySelector(arguments[0]).innerText", query)

    def choose(self, browser: Browser, query: str, value: str) -> None:
        browser.run(
            "const s = document.querySelector(arguments[0]); s.focus(); s.value = arguments[1];"
            "s.dispatchEvent(new Event('change', {bubbles: true}))",
            query,
            value,
        )

    def test_opens_draws_and_reacts(self, browser: Browser) -> None:
        assert "swla as shipped" in self.shown(browser, "#where")
        assert "window of 8" in browser.run("return document.querySelector('#rule svg').textContent")
        assert browser.run("return document.querySelector('#rule svg').getBoundingClientRect().height") > 200
        assert browser.run("return document.querySelectorAll('#equation math').length") > 6
        assert "plan: linear" in self.shown(browser, "#plan pre")
        assert "linear_attention given window.size=1, gates.retain=1" in self.shown(browser, "#reduces")
        assert "def " in self.shown(browser, "#source pre")
        self.choose(browser, "#knob-window-size", "1")
        assert "window: 1 instead of 8" in self.shown(browser, "#where")
        assert "window of 8" not in browser.run("return document.querySelector('#rule svg').textContent")
        assert browser.run("return document.activeElement.id") == "knob-window-size"
        self.choose(browser, "#knob-bias", "l2")
        assert "bias: l2" in self.shown(browser, "#where") and "window" not in self.shown(browser, "#where")
        assert "plan: solve" in self.shown(browser, "#plan pre")
        browser.run("document.querySelector('#back').click()")
        assert "as shipped" in self.shown(browser, "#where")

    def test_refusal_is_shown(self, browser: Browser) -> None:
        browser.run("data.presets[state.preset].turns.features.relu = 'SpecError at features'; show()")
        self.choose(browser, "#knob-features", "relu")
        assert self.shown(browser, "#refused pre") == "SpecError at features"
        assert browser.run("return ['equation', 'rule', 'plan', 'source'].every((id) => document.getElementById(id).hidden)")
        browser.run("document.querySelector('#back').click()")
        assert browser.run("return document.querySelector('#refused').hidden && !document.querySelector('#rule').hidden")

    def test_a_link_to_a_preset(self, browser: Browser) -> None:
        browser.run("document.querySelector('#reduces button').click()")
        assert "as shipped" in self.shown(browser, "#where") and "swla" not in self.shown(browser, "#where")

    def test_keyboard(self, browser: Browser) -> None:
        browser.run("document.querySelector('#preset').focus()")
        browser.press("ArrowUp")
        browser.until("document.querySelector('#where').innerText.includes('deltanet')")
        seen = []
        for _ in range(4):
            browser.press("Tab")
            seen.append(browser.run("return document.activeElement.id || document.activeElement.tagName"))
        assert all(name.startswith("knob-") for name in seen[:3]), seen
        labels = browser.run("return [...document.querySelectorAll('select')].every((s) => s.labels.length === 1)")
        assert labels

    def test_theme_and_width(self, browser: Browser) -> None:
        colour = "getComputedStyle(document.body).backgroundColor"
        before = browser.run(f"return {colour}")
        browser.run("document.querySelector('#theme').click()")
        assert browser.run(f"return {colour}") != before
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out to the right"


# What a drawing in a page must not have: text out of its box, boxes over each other, labels over boxes or over each other.
CLASHES = r"""
const bad = [], boxes = [];
const hit = (a, b) => a.x < b.x + b.width - 1 && b.x < a.x + a.width - 1 && a.y < b.y + b.height - 1 && b.y < a.y + a.height - 1;
for (const group of document.querySelectorAll("svg.drawing g.node")) {
  const shape = group.querySelector("path, polygon");
  if (!shape) continue;
  const box = shape.getBBox();
  for (const text of group.querySelectorAll("text")) {
    const own = text.getBBox(), right = own.x + own.width > box.x + box.width + 0.5, low = own.y + own.height > box.y + box.height + 4;
    if (text.textContent.trim() && (own.x < box.x - 0.5 || right || own.y < box.y - 1 || low)) bad.push("cut: " + text.textContent);
  }
  if (boxes.some((other) => hit(box, other))) bad.push("boxes overlap: " + group.textContent.trim());
  boxes.push(box);
}
const labels = [];
for (const text of document.querySelectorAll("svg.drawing g.edge text")) {
  const own = text.getBBox();
  if (boxes.some((box) => hit(own, box)) || labels.some((other) => hit(own, other))) bad.push("label on something: " + text.textContent);
  labels.push(own);
}
return [boxes.length, bad];
"""


@pytest.mark.skipif(bool(BROWSER), reason=BROWSER)
@pytest.mark.skipif(bool(FONT), reason=FONT)
def test_nothing_overlaps_or_is_cut(tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        for name in ("atlas", "titans", "swdt", "kda"):
            for view in VIEWS:
                path = tmp_path / "drawing.html"
                path.write_text(drawing_files.page(visualize(name, view)), encoding="utf-8")
                browser.open(path.as_uri(), "document.querySelector('svg.drawing') !== null")
                boxes, bad = browser.run(CLASHES)
                assert boxes > 8 and not bad, (name, view, bad)
        assert browser.errors() == []
        browser.run("document.querySelector('g.node path').setAttribute('d', 'M0,0h1v1z')")
        assert browser.run(CLASHES)[1], "a cut text is found"
        browser.run("console.error('seen')")
        assert len(browser.errors()) == 1, "an error on the console is found"
