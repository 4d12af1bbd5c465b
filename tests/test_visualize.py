"""Drawings: what is in them follows from the spec, every preset draws in every view, files are what their names say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import memkit
from memkit import drawing_dot, drawing_files
from memkit.cli import main
from memkit.compiler.cost import count, given
from memkit.drawing import VIEWS, picture, visualize
from memkit.drawing_model import Box, Picture
from memkit.drawing_text import count as shown
from memkit.drawing_text import label_html, wrapped
from memkit.explorer import explorer
from memkit.specs.errors import KernelError, SpecError

PURE = drawing_dot.program("svg") is not None
needs_renderer = pytest.mark.skipif(not PURE, reason="neither dot nor graphviz-pure is here")


def boxes(made: Picture) -> dict[str, Box]:
    return {box.name: box for box in made.boxes}


def titles(made: Picture) -> set[str]:
    return {box.title for box in made.boxes}


def arrows(made: Picture, kind: str) -> set[tuple[str, str]]:
    return {(a.tail, a.head) for a in made.arrows if a.kind == kind}


class TestRule:
    @pytest.mark.parametrize("size", [1, 2, 5, 8])
    def test_window_tokens_are_drawn_when_there_are_some(self, size: int) -> None:
        tokens = boxes(picture("swla", overrides={"window.size": size}))["tokens"]
        assert bool(tokens.cells) == (size > 1)
        if size > 1:
            assert tokens.cells[0] == f"t-{size - 1}"
            assert tokens.cells[-1] == "t"
            assert str(size) in tokens.title

    @pytest.mark.parametrize("size, wanted", [(1, "window_gate_t"), (4, "window_gate_{t,i}")])
    def test_the_window_gate_is_named_as_in_the_gradient(self, size: int, wanted: str) -> None:
        found = boxes(picture("swla", overrides={"window.size": size}))
        assert found["gate_window_gate"].title == wanted
        assert wanted in found["gradient"].title

    @pytest.mark.parametrize("kind, slot", [("gd", False), ("momentum", True), ("muon", True)])
    def test_a_slot_is_drawn_when_the_optimizer_has_one(self, kind: str, slot: bool) -> None:
        found = boxes(picture("deltanet", overrides={"optimizer": kind}))
        assert ("slot_S" in found) == slot
        assert ("slot_S_after" in found) == slot

    def test_every_open_gate_has_a_box_and_no_number_has(self) -> None:
        for name in memkit.presets():
            found = {box.removeprefix("gate_") for box in boxes(picture(name)) if box.startswith("gate_")}
            wanted = set(memkit.reference(name, key_dim=4, value_dim=4).gates)
            assert found == wanted, name

    def test_gates_act_where_their_name_stands(self) -> None:
        made = picture("atlas")
        edges = arrows(made, "value")
        found = boxes(made)
        for gate in ("momentum", "step_size"):
            (head,) = [h for t, h in edges if t == f"gate_{gate}"]
            assert f"{gate}_t" in found[head].title
        assert ("gate_retain", "retain") in edges
        assert ("gate_window_gate", "gradient") in edges

    @pytest.mark.parametrize("at, tail", [("token", "W_before"), ("decayed", "retain"), ("chunk", "anchor")])
    def test_the_prediction_reads_the_memory_that_grad_at_names(self, at: str, tail: str) -> None:
        made = picture("gated_deltanet", overrides={"update.grad_at": at})
        assert (tail, "predict") in arrows(made, "value")
        assert ("anchor" in boxes(made)) == (at == "chunk")

    @pytest.mark.parametrize("read, tail", [("after", "W_after"), ("before", "W_before")])
    def test_the_read(self, read: str, tail: str) -> None:
        made = picture("deltanet", overrides={"update.read": read})
        assert [t for t, h in arrows(made, "value") if h == "read" and t.startswith("W")] == [tail]

    def test_the_inner_gradient_goes_from_the_loss_to_the_write(self) -> None:
        inner = dict(arrows(picture("titans"), "inner"))
        path = ["loss"]
        while path[-1] in inner and len(path) < 10:
            path.append(inner[path[-1]])
        assert path == ["loss", "gradient", "optimizer_0", "optimizer_1", "write"]

    def test_a_loss_whose_gradient_ignores_the_prediction(self) -> None:
        linear, deep, l2 = (picture(name) for name in ("linear_attention", "dla", "deltanet"))
        assert ("predict", "loss") in arrows(linear, "idle")
        assert ("W_before", "predict") in arrows(linear, "idle")
        assert ("predict", "loss") in arrows(deep, "idle")
        assert ("anchor", "predict") in arrows(deep, "value")
        assert not arrows(l2, "idle")

    def test_features_and_learned_scalars(self) -> None:
        found = boxes(picture("atlas"))
        assert {"features_key", "features_query", "scalars_key"} <= set(found)
        assert not {"features_key", "features_query", "scalars_key"} & set(boxes(picture("deltanet")))
        assert {"norm_predict", "norm_read"} <= set(boxes(picture("ttt_mlp")))

    def test_inner_and_outer_gradient_have_their_own_lines_and_a_legend(self) -> None:
        source = visualize("titans").source
        assert 'color="#b5541c:#2f6fb3"' in source
        assert "style=dashed" in source
        for words in ("inner gradient", "outer gradient", "learned by training", "lives in the state"):
            assert words in source


class TestPlan:
    @pytest.mark.parametrize("name", memkit.presets())
    def test_costs_add_up_to_what_the_compiler_counts(self, name: str) -> None:
        rule = memkit.compile(name, key_dim=16, value_dim=16)
        compiled: Any = rule.compiled  # type: ignore[attr-defined]
        made = picture(rule, "plan")
        graph = compiled.graphs[made.title.partition("graph ")[2]].last
        flops = count(graph, given(compiled.equations, compiled.chunk)).flops
        assert any(shown(flops, "FLOP") in note for note in made.notes), (made.notes, flops)

    def test_every_arrow_has_axes_and_every_step_a_cost(self) -> None:
        for name in ("swla", "titans", "atlas", "dot"):
            made = picture(name, "plan")
            assert all(arrow.label for arrow in made.arrows)
            for box in made.boxes:
                assert box.kind not in ("step", "fused") or "FLOP" in box.lines[-1], box

    def test_loops_and_fused_nodes_are_clusters(self) -> None:
        rule = memkit.compile("titans", key_dim=64, value_dim=64)
        made = picture(rule, "plan")
        kinds = [cluster.kind for cluster in made.clusters]
        shown_graph = rule.source.count("def forward")
        assert "step" in kinds and "fused" in kinds and shown_graph
        carried = [box for box in made.boxes if box.title.endswith("carried") and box.kind == "inner"]
        assert len(carried) == 4  # W1, W2 and the slot of each

    def test_after_a_pass(self) -> None:
        before, after = (picture("titans", "plan", after=step) for step in ("lower", "fuse"))
        assert "after lower" in before.title
        assert not [c for c in before.clusters if c.kind == "fused"]
        assert [c for c in after.clusters if c.kind == "fused"]
        with pytest.raises(SpecError, match="did you mean fuse"):
            visualize("titans", "plan", after="fus")
        with pytest.raises(SpecError, match="only for view plan"):
            visualize("titans", "rule", after="fuse")

    def test_a_box_names_what_second_boxes_repeat(self) -> None:
        for name in memkit.presets():
            made = picture(name, "plan")
            named = {title.partition(" = ")[0] for title in titles(made)}
            for box in made.boxes:
                if box.kind == "again":
                    first = [b for b in made.boxes if b.kind != "again" and b.title.partition(" = ")[0] == box.title]
                    assert len(first) == 1, (name, box)
            assert named


class TestLayer:
    def test_parts_follow_the_spec(self) -> None:
        everything = boxes(picture("atlas", "layer"))
        assert {"conv", "tail", "key_norm", "gates_projected", "scalars", "initial", "norm", "output_gate", "output"} <= set(everything)
        bare = {"layer.conv": 0, "layer.key_norm": "none", "layer.output_norm": "none", "layer.output_gate": False}
        found = boxes(picture("linear_attention", "layer", overrides=bare))
        assert not {"conv", "tail", "key_norm", "gates_projected", "scalars", "initial", "norm", "output_gate"} & set(found)
        assert "gates_learned" in boxes(picture("retnet", "layer"))

    def test_a_layer_is_drawn_with_its_own_widths(self) -> None:
        layer = memkit.load("deltanet", dim=24, heads=3)
        found = boxes(picture(layer, "layer"))
        assert found["x"].lines == ("[B, T, 24]",)
        assert found["y_heads"].lines == ("[B, T, 3, 8]",)
        total = sum(p.numel() for p in layer.output.parameters())
        assert found["output"].lines == (f"{total:,} learned",)
        assert "K = 8, V = 8" in picture(layer, "plan").notes[0]


@needs_renderer
class TestFiles:
    @pytest.mark.parametrize("view", VIEWS)
    def test_every_preset_draws(self, view: str) -> None:
        for name in memkit.presets():
            drawing = visualize(name, view)
            assert drawing.source == visualize(name, view).source, "the same spec gives the same text"
            svg = ElementTree.fromstring(drawing.pipe("svg"))
            text = "".join("".join(node.itertext()) for node in svg.iter() if node.tag.endswith("text"))
            assert name in text
            width = float(svg.attrib["width"].removesuffix("pt"))
            assert width < {"rule": 680, "layer": 680, "plan": 1500}[view], (name, width)

    @pytest.mark.parametrize("kind, magic", [("svg", b"<?xml"), ("png", b"\x89PNG\r\n"), ("dot", b"//"), ("html", b"<!doctype html>")])
    def test_formats(self, kind: str, magic: bytes) -> None:
        assert drawing_files.content(visualize("deltanet"), kind).startswith(magic)

    def test_notebook(self) -> None:
        shown_here = visualize("deltanet")._repr_mimebundle_()
        assert "<svg" in shown_here["image/svg+xml"]

    def test_render_writes_files(self, tmp_path: Path) -> None:
        out = tmp_path / "a.png"
        assert visualize("deltanet").render(outfile=out) == str(out)
        assert out.read_bytes().startswith(b"\x89PNG")
        path = visualize("deltanet").render(tmp_path / "b.gv", format="svg", cleanup=True)
        assert "<svg" in Path(path).read_text()


class TestWithoutPrograms:
    @pytest.fixture(autouse=True)
    def nothing_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drawing_dot.shutil, "which", lambda *_, **__: None)

    def test_dot_and_html_always(self) -> None:
        drawing = visualize("atlas")
        assert drawing_files.content(drawing, "dot").startswith(b"//")
        page = drawing_files.content(drawing, "html").decode()
        for box in drawing.picture.boxes:
            assert f'id="{box.name}"' in page
        assert drawing._repr_mimebundle_() == {"text/plain": drawing.source}

    @pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
    def test_the_rest_says_what_to_install(self, kind: str) -> None:
        with pytest.raises(KernelError, match="Graphviz") as error:
            drawing_files.content(visualize("deltanet"), kind)
        assert ("graphviz-pure" in str(error.value)) == (kind != "pdf") and "--view rule" in str(error.value)

    def test_the_explorer_refuses_at_once(self) -> None:
        with pytest.raises(KernelError, match="--view rule"):
            explorer("deltanet", ("deltanet",), progress=False)


class TestMistakes:
    def test_view(self) -> None:
        with pytest.raises(SpecError, match="did you mean rule"):
            memkit.visualize("atlas", "rul")

    def test_overrides(self) -> None:
        wider = memkit.spec("deltanet", {"window.size": 3})
        assert memkit.visualize("deltanet", overrides={"window.size": 3}).source == visualize(wider).source
        assert memkit.explain("deltanet", overrides={"window.size": 3}) == memkit.explain(wider)
        assert memkit.explain("deltanet", overrides={}) == memkit.explain("deltanet")
        with pytest.raises(SpecError, match="did you mean window"):
            memkit.explain("deltanet", overrides={"windw.size": 3})

    def test_ending(self) -> None:
        with pytest.raises(SpecError, match=r"\.svg, \.png, \.pdf, \.dot, \.html"):
            drawing_files.format_of(Path("a.jpg"))

    def test_a_kind_of_another_package_is_drawn_with_its_own_words(self) -> None:
        made = picture("deltanet", overrides={"bias": {"kind": "expression", "formula": "log(cosh(r))"}})
        assert any("log(cosh(r))" in line for line in boxes(made)["loss"].lines)

    def test_face_stays_a_function(self) -> None:
        code = "import memkit; memkit.visualize('gla'); memkit.visualize('gla', 'layer'); print(callable(memkit.visualize))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("W_{t-1}", "W<SUB>"),
        ("step_size_t G_t", "step_size<SUB>"),
        ("||p - v||^2", "&#178;"),
        ("a < b & c", "a &lt; b &amp; c"),
        ("S_W1", "S<SUB>"),
        ("W_next", "W_next"),
        ("|p|^2.5", "^2.5"),
    ],
)
def test_label(text: str, wanted: str) -> None:
    assert wanted in label_html(text, 10)


def test_long_text_is_cut_and_says_so() -> None:
    lines = wrapped("word " * 200, 30)
    assert len(lines) == 4
    assert lines[-1].endswith(" ..")
    assert all(len(line) <= 31 for line in lines)


@pytest.mark.parametrize(
    "number, wanted", [(12, "12 B"), (9999, "9,999 B"), (16640, "16.6 kB"), (2.5e6, "2.5 MB"), (3e9, "3 GB"), (2e12, "2 TB")]
)
def test_count(number: float, wanted: str) -> None:
    assert shown(number, "B") == wanted


class TestCommand:
    def run(self, *args: str) -> int:
        with pytest.raises(SystemExit) as stop:
            main(["graph", *args])
        return int(stop.value.code or 0)

    def test_dot_text_without_out(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("deltanet", "--set", "window.size=3") == 0
        assert "window of 3" in capsys.readouterr().out

    @needs_renderer
    @pytest.mark.parametrize("args, wanted", [(("--view", "layer"), "output projection"), (("--after", "lower"), "after lower")])
    def test_files(self, args: tuple[str, ...], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for kind in ("svg", "dot", "html"):
            out = tmp_path / f"a.{kind}"
            assert self.run("deltanet", *args, "-o", str(out)) == 0
            assert wanted in out.read_text().replace("&#160;", " ").replace("&#45;", "-")
            assert f"{out}: written" in capsys.readouterr().out

    def test_mistakes_exit_with_2(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(drawing_dot.shutil, "which", lambda *_, **__: None)
        for args, words in (
            (("deltanet", "-o", str(tmp_path / "a.pdf")), "apt install graphviz"),
            (("deltanet", "-o", str(tmp_path / "a.bmp")), ".svg"),
            (("deltanet", "--view", "plan", "--after", "no_such"), "a pass that ran"),
            (("deltanet", "-o", str(tmp_path / "none" / "a.dot")), "a folder that exists"),
        ):
            assert self.run(*args) == 2, args
            assert words in capsys.readouterr().err
