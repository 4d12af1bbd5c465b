"""The emitted C++: one preset's in full, and what holds for all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memkit
from memkit import cli
from memkit.compiler import ir, native_run
from memkit.compiler.emit_native import _table
from memkit.compiler.native import step
from memkit.compiler.native.arena import Memory
from memkit.compiler.native.entries import COPIES, Entries, Index, Nest, Square, View
from memkit.compiler.native.names import Names
from memkit.compiler.native_rule import NativeRule

from .rules import COVERED, wide

GOLDEN = Path(__file__).parent / "linear_attention.cpp"


def source(name: str, width: int = 4) -> str:
    rule = memkit.compile(name, key_dim=width, value_dim=width, backend="native")
    assert isinstance(rule, NativeRule)
    return rule.native.module.source


@pytest.mark.without_compiler
def test_one_preset_in_full() -> None:
    """After a change that is meant:

    memkit emit linear_attention --key-dim 4 --value-dim 4 --backend native > tests/native/linear_attention.cpp
    """
    assert source("linear_attention").strip() == GOLDEN.read_text(encoding="utf-8").strip()


@pytest.mark.without_compiler
@pytest.mark.parametrize("name", COVERED)
def test_every_preset_has_source(name: str) -> None:
    text = source(name, 8)
    made = re.findall(r'extern "C" int (\w+)\(', text)
    assert len(made) == len(set(made))
    for kind in ("", "_saving", "_backward"):
        assert f"resume{kind}" in made or f"chunks{kind}" in made
    for name in made:
        assert name.removesuffix("_saving").removesuffix("_backward").removesuffix("_thin").removesuffix("_states") in made


@pytest.mark.without_compiler
@pytest.mark.parametrize("name", ["atlas", "atlas_plus"])
def test_an_iteration_stays_with_its_member(name: str) -> None:
    """Forward and backward of Newton-Schulz are one loop: no matrix in between lies where other tokens' matrices lie."""
    text = source(name, 16).partition('extern "C" int resume_saving')[2]
    calls = re.findall(r"product_upper\((.*)\);", text)
    assert "turned(64, 64, " in text, "what is read across its rows is turned first"
    assert len(calls) >= 10 and not any("* " in part for call in calls for part in call.split(", ")), calls


@pytest.mark.without_compiler
@pytest.mark.parametrize("case", ["features in stretches", "frozen with a window"])
def test_products_of_a_window_are_made_where_they_are_added(case: str) -> None:
    """Two products, one a window's length behind the other, in one value: not each in one of its own, to be added up."""
    made = wide(case).native.module.unit("chunks_backward").partition("// fold [g, s, f]")[2].partition("// ")[0]
    assert made.count("product(") == 2 and "+=" not in made, made


@pytest.mark.without_compiler
def test_no_block_reads_a_wide_state_again() -> None:
    """Products with a state of 2,145 features are made at once; small ones, to which others are added, a few rows at a time."""
    rule = memkit.compile("omeganet", key_dim=64, value_dim=64, backend="native", overrides={"window.size": 16, "update.chunk_size": 64})
    assert isinstance(rule, NativeRule)
    text = rule.native.module.unit("chunks_saving").partition("// along n")[2].partition("\n    }\n")[0]
    calls = [call for call in re.findall(r"product\((.*)\);", text) if "2145" in call]
    assert len(calls) >= 3 and not any("_first" in call for call in calls), calls
    assert re.search(r"product\(64, fewer\(64, .*W2_next \+ e_first", text), "blocks of a state that is small enough for them"


@pytest.mark.without_compiler
def test_room_is_as_large_as_emitted_code_takes_it_for() -> None:
    """And the sum of more matrices read across their rows than are copied leaves the others where they lie."""
    text = (Path(step.__file__).parent / "products.cpp").read_text(encoding="utf-8")
    assert f"constexpr long ROOM = {step.ROOM};" in text
    matrices = [ir.param(f"x{i}", ("v", "k")) for i in range(COPIES + 2)]
    nest = Nest()
    entries = Entries(nest, {x: View(f"x{i}", {"v": "1", "k": "20"}, Memory(f"x{i}")) for i, x in enumerate(matrices)}, {}, Names(), {})
    entries.square = Square("i", 20, "j", 20)
    for variable in ("i", "j"):
        nest.enter(variable, "")
    at = {"v": Index("i", frozenset({"i"})), "k": Index("j", frozenset({"j"}))}
    read = [entries.value(x, at).text for x in matrices]
    assert sum(t.startswith("room[") for t in read) == len(nest.lines[0]) == COPIES and read[-1] == f"x{COPIES + 1}[i + j * 20]"


@pytest.mark.without_compiler
@pytest.mark.parametrize("name", ["titans", "omeganet", "ttt_mlp", "gla", "kda"])
def test_states_stay_with_the_members_that_made_them(name: str) -> None:
    """A team's members keep their parts of a state in memory of their own, and what they add up over its axis is gathered."""
    text = source(name, 64)
    for function in ("chunks", "chunks_backward"):
        head = text.partition(f"static void {function}_head(")[2].partition('extern "C"')[0]
        slots = re.findall(r"real\* const (\w+_slots\w*) = (members == 1 \? \w+ : )?(\w+) \+", head)
        assert slots and all(space == "own" for _, _, space in slots), (function, slots)
        assert function == "chunks" or re.search(r"sums\w* \+ (member|\(member - 1\)) \* apart", head)


@pytest.mark.without_compiler
def test_one_wait_serves_all_sums_that_members_then_read() -> None:
    rule = memkit.compile("titans", key_dim=64, value_dim=64, backend="native", overrides={"update.chunk_size": 16})
    assert isinstance(rule, NativeRule)
    text = rule.native.module.functions["chunks_backward"].text
    sums, waits = len(re.findall(r"real\* const sums\w* =", text)), text.count("team.wait();")
    assert sums > 12 and waits < sums // 2, (sums, waits)


@pytest.mark.without_compiler
def test_members_make_what_is_cheap_for_themselves() -> None:
    """Features of a chunk, which products read whole: to fetch another member's half would take longer than to make it."""
    rule = memkit.compile("omeganet", key_dim=32, value_dim=32, backend="native", overrides={"window.size": 16})
    assert isinstance(rule, NativeRule)
    text = rule.native.module.functions["chunks_saving"].text
    wide = re.findall(r"// mul \[g, [st], p32\]\n +real\* const \w+ = (\w+) \+ \d+;\n +(?:team.wait.*\n +)?for \(long \w+ = (\S+);", text)
    assert len(wide) == 4 and set(wide) == {("own", "0")}, wide  # of keys and queries, and before and behind the loop
    assert text.count("team.wait();") < 8


@pytest.mark.without_compiler
@pytest.mark.parametrize("name", ["titans", "omeganet", "ttt_mlp"])
def test_saved_states_lie_member_by_member(name: str) -> None:
    """And all functions know it: else they would take one entry for another."""
    rule = memkit.compile(name, key_dim=32, value_dim=32, backend="native")
    assert isinstance(rule, NativeRule)
    functions, stacks = rule.native.module.functions, rule.native.module.stacks["chunks"]
    laid = {label: axes for label, axes, _ in functions["chunks_saving"].results if label in stacks}
    assert laid and all(axes[:3] == ("n", "g", "e") for axes in laid.values()), laid
    assert {label: axes for label, axes, _ in functions["chunks_states"].results if label in stacks} == laid
    back = functions["chunks_backward"]
    assert laid.items() <= dict(zip(back.inputs, back.axes, strict=True)).items()


@pytest.mark.without_compiler
@pytest.mark.parametrize("case", ["long chunks of solve", "long chunks of frozen"])
def test_products_leave_out_zeros(case: str) -> None:
    calls = re.findall(r"product\((.*)\);", wide(case).native.module.source)
    left_out = [c for c in calls if re.search(r"fewer\((LT|\(LT \+ \d+\)), \w+_first\w* \+ \d+\)|above\(", c.split(", room")[0])]
    assert len(left_out) >= len(calls) // 8, calls


@pytest.mark.without_compiler
def test_scratch_memory_does_not_grow_with_the_weights() -> None:
    """Wide memories are made a few tokens at a time: 64 tokens of this one's would take gigabytes."""
    assert [native_run.block(numbers) for numbers in (1, 1 << 14, 1 << 17, 1 << 25)] == [8, 8, 4, 4]
    numbers = [int(n) for n in re.findall(r"for_heads\(G, threads, (\d+)", source("atlas", 64))]
    assert max(numbers) < 40 * 549120, numbers


@pytest.mark.without_compiler
def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["emit", "linear_attention", "--key-dim", "4", "--value-dim", "4", "--backend", "native"])
    assert capsys.readouterr().out.strip() == GOLDEN.read_text(encoding="utf-8").strip()


@pytest.mark.parametrize(("name", "line"), [("titans", "  native: runs C++ on CPU"), ("dot", "  not native: plan span has none")])
def test_explain_says_where_there_is_cpp(name: str, line: str) -> None:
    told = memkit.compile(name, key_dim=4, value_dim=4).explain()
    assert line in told.partition("\nbackend: torch")[2]
    if line.startswith("  native"):
        assert memkit.compile(name, key_dim=4, value_dim=4, backend="native").explain().endswith("\nbackend: native")


@pytest.mark.without_compiler
def test_the_command_says_why_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["emit", "exp_attention", "--backend", "native"])
    assert ended.value.code == 2 and "plan span" in capsys.readouterr().err


@pytest.mark.without_compiler
def test_constants_are_written_as_cpp_has_them() -> None:
    text = _table("x", "constant", (float("inf"), -float("inf"), float("nan"), 0.5))
    assert "real(INFINITY), real(-INFINITY), real(NAN), real(0.5)" in text


@pytest.mark.without_compiler
def test_related_functions_are_made_in_one_loop() -> None:
    """A gelu and its slope share most of what they take: where both of a value are wanted, neither is made alone, or twice."""
    rule = memkit.compile("titans", key_dim=64, value_dim=64, backend="native")
    assert isinstance(rule, NativeRule)
    functions = rule.native.module.functions
    for name, several in {"chunks_thin": 1, "chunks_states": 1, "chunks_backward": 2}.items():
        made = re.findall(r"const real \w+ = fn_(gelu\w*)\((.*)\);\n", functions[name].text)
        assert {x for _, x in made if (("gelu", x) in made) != (("gelu_slope", x) in made)} == set(), made
        assert len(made) == 2 * several and functions[name].text.count("fn_gelu_slope") == several, (name, made)


@pytest.mark.without_compiler
def test_values_side_by_side_take_no_sum() -> None:
    """What the tokens before a chunk and its own are read as is laid in one array as it is read, not added to zeros."""
    overrides = {"update.chunk_size": 64, "window.size": 16}
    rule = memkit.compile("omeganet", key_dim=64, value_dim=64, overrides=overrides, backend="native")
    assert isinstance(rule, NativeRule)
    text = rule.native.module.functions["chunks_backward"].text
    laid = re.search(r"// fold \[g, s, e\].*?= \(\((\w+) >= .*?kept5\[.*? : real\(0\)\) \+ \(\1 < 16 \? W1_ahead\[", text, re.DOTALL)
    assert laid and "+=" not in laid[0]
    assert text.count("// fold [g, s, e]") == 2, "those that are read once are laid where they are read"
