"""The command line: what it prints, its exit codes, and that no mistake ends in a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memkit import cli, cli_tools
from memkit.specs.component import FAMILIES
from memkit.specs.io import load_spec, load_text, presets


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in out + err


@pytest.fixture
def memkit(capsys: pytest.CaptureFixture[str]):
    def call(*args: str) -> Result:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(args))
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return call


def test_list_names_every_preset_with_its_source(memkit) -> None:
    result = memkit("list")
    assert result.code == 0 and [line.split()[0] for line in result.out.splitlines()] == list(presets())
    assert all("arXiv" in line for line in result.out.splitlines())


def test_list_kinds(memkit) -> None:
    result = memkit("list", "--kinds")
    assert result.code == 0 and "bias: huber" in result.out and "gate: learned" in result.out


def test_list_kinds_gives_every_field_of_every_kind(memkit) -> None:
    lines = memkit("list", "--kinds").out.splitlines()
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        name, _, text = line.strip().partition("  ")
        if line.startswith("  "):
            found[list(found)[-1]][name] = text.strip()
        else:
            found[name] = {}
    for family, root in FAMILIES.items():
        for kind, member in root.members.items():
            assert set(found[f"{family}: {kind}"]) == set(member.model_fields)
    assert set(found["window"]) == {"size", "gate"} and set(found["update"]) == {"grad_at", "chunk_size", "read"}
    assert found["memory: mlp"]["depth"] == "a whole number from 1 to 8, default 2: number of weight matrices"
    assert found["retention: scalar"]["gate"].startswith("one of input, learned, or a number from 0 to 1, or {kind: ...}, default input")
    assert all("a value" not in text and ", default " in text for fields in found.values() for text in fields.values())


def test_show_prints_a_spec_that_loads(memkit) -> None:
    for flags in ([], ["--full"]):
        result = memkit("show", "atlas", *flags)
        assert result.code == 0 and load_text(result.out) == load_spec("atlas")
    result = memkit("show", "atlas", "--set", "window.size=1", "--set", "memory=linear", "--set", "bias={kind: huber, delta: 0.5}")
    wanted = load_spec("atlas", {"window.size": 1, "memory": "linear", "bias": {"kind": "huber", "delta": 0.5}})
    assert result.code == 0 and load_text(result.out) == wanted
    assert load_text(memkit("show", "gla", "--set", "window.size=2", "--set", "window.size=3").out).window.size == 3


@pytest.mark.parametrize(
    ("args", "err"),
    [
        (["show", "atlass"], "did you mean atlas?"),
        (["show", "../atlas"], "no slashes"),
        (["show", "missing.yaml"], "no file missing.yaml"),
        (["show", "a\0b"], "no preset"),
        (["show", "."], "is a directory"),
        (["show", "atlas", "--set", "window.size"], "PATH=VALUE"),
        (["show", "atlas", "--set", "=1"], "PATH=VALUE"),
        (["show", "atlas", "--set", "window.size="], "size: null"),
        (["show", "atlas", "--set", "window.size=[1"], "--set window.size:1:3"),
        (["show", "atlas", "--set", "memory=!!python/name:os.system x"], "the tag"),
        (["show", "atlas", "--set", "window.size=.nan"], "a finite number"),
        (["show", "atlas", "--set", "windw.size=1"], "did you mean window?"),
        (["show", "atlas", "--import", "no_such_module"], "ModuleNotFoundError: No module named 'no_such_module'"),
        (["show", "atlas", "--import", "kinds/my.py"], "a module's name: my"),
        (["show", "atlas", "--import", ".x"], "TypeError"),
        (["show"], "Missing argument"),
        (["shw"], "No such command"),
        (["validate"], "Missing argument"),
        (["new"], "Missing argument"),
        (["new", "no/folder/x.yaml"], "cannot be written"),
        (["new", "x.txt"], "x.txt.yaml"),
        (["explain", "nope"], "no preset nope"),
    ],
)
def test_mistakes_end_in_a_message_and_exit_code_2(memkit, args: list[str], err: str) -> None:
    result = memkit(*args)
    assert result.code == 2 and err in result.err and result.out == ""


def test_validate_reports_all_files(memkit) -> None:
    Path("good.yaml").write_text("memory: mlp\n")
    Path("bad.yaml").write_text("windw: 1\nmemory: mpl\n")
    Path("plain").write_text("bias: l3\n")
    assert memkit("validate", "good.yaml", "atlas").out == "good.yaml: ok\natlas: ok\n"
    result = memkit("validate", "bad.yaml", "good.yaml", "plain", "nope")
    assert result.code == 2 and result.out == "good.yaml: ok\n"
    assert [line for line in result.err.splitlines() if " at " in line] == [
        "SpecError at bad.yaml:1:1",
        "SpecError at bad.yaml:2:9",
        "SpecError at plain:1:7",
        "SpecError at source",
    ]
    assert memkit("validate", "good.yaml", "--set", "memory.depth=9").code == 2


@pytest.mark.parametrize("base", ["deltanet", "atlas", "kda", "exp_attention", "atlas_plus"])
def test_new_writes_a_commented_spec_that_validates(memkit, base: str) -> None:
    result = memkit("new", "my-layer.yaml", "--from", base)
    assert result.code == 0 and memkit("validate", "my-layer.yaml").code == 0
    text, spec = Path("my-layer.yaml").read_text(), load_spec("my-layer.yaml")
    assert spec.model_copy(update={"name": base, "source": load_spec(base).source}) == load_spec(base) and spec.name == "my-layer"
    assert text.startswith("# yaml-language-server: $schema=file:///") and text.count("#") > 25 and "memkit list --kinds" in text
    assert all(f"\n{field}: " in text for field in type(spec).model_fields)
    again = memkit("new", "my-layer.yaml")
    assert again.code == 2 and "--force" in again.err and Path("my-layer.yaml").read_text() == text
    assert memkit("new", "my-layer.yaml", "--from", "retnet", "--force").code == 0 and Path("my-layer.yaml").read_text() != text


def test_new_on_the_terminal_and_with_odd_names(memkit) -> None:
    assert load_text(memkit("new", "-").out).name == "custom"
    assert memkit("new", "3 ä.yaml").code == 0 and load_spec("3 ä.yaml").name == "custom"


KIND = '''
from pydantic import Field
from memkit.specs.bias import AttentionalBias

class Quartic{n}(AttentionalBias):
    """The fourth power.

    Equation:  sum r^4
    """
    kind = "quartic{n}"
    scale: float = Field(default=1.0, gt=0, description="factor")

    def loss(self, prediction, target):
        return self.scale * ((prediction - target) ** 4).sum()
'''


@pytest.fixture
def forget():
    from memkit.specs.bias import AttentionalBias

    before = dict(AttentionalBias.members)
    yield
    AttentionalBias.members.clear()
    AttentionalBias.members.update(before)


@pytest.mark.usefixtures("forget")
def test_import_brings_kinds_from_the_current_directory(memkit) -> None:
    Path("quartic_one.py").write_text(KIND.format(n=1))
    Path("x.yaml").write_text("bias: {kind: quartic1, scale: 2}\n")
    assert memkit("validate", "x.yaml").code == 2
    assert memkit("validate", "x.yaml", "--import", "quartic_one").code == 0
    assert "bias: quartic1" in memkit("list", "--import", "quartic_one").out
    assert "did you mean scale?" in memkit("show", "x.yaml", "--set", "bias.scle=1", "--import", "quartic_one").err


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("text", "err"),
    [
        ("import no_such_thing\n", "broken_0.py:1"),
        ("x = 1\nraise RuntimeError('it broke')\n", "RuntimeError: it broke ("),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(0)\n", "SystemExit"),
        (KIND.format(n=2) + KIND.format(n=2).replace("class Quartic2", "class Other"), "a second bias called 'quartic2'"),
    ],
)
def test_what_goes_wrong_in_an_import_is_shown_plainly(memkit, request: pytest.FixtureRequest, text: str, err: str) -> None:
    name = f"broken_{request.node.callspec.indices['text']}"
    Path(f"{name}.py").write_text(text)
    result = memkit("show", "gla", "--import", name)
    assert result.code == 2 and err in result.err and f"SpecError at --import {name}" in result.err


def test_version_and_help(memkit) -> None:
    assert memkit("--version").out.startswith("memkit 0.")
    for args in (["--help"], ["-h"], ["show", "--help"], ["new", "-h"]):
        result = memkit(*args)
        assert result.code == 0 and "Usage" in result.out


def test_every_command_that_is_listed_has_help(memkit) -> None:
    for command in list(cli.app.registered_commands):
        for flag in ("-h", "--help"):
            result = memkit(str(command.name or getattr(command.callback, "__name__", "")), flag)
            assert result.code == 0 and "Usage" in result.out


def test_a_command_with_its_own_options_takes_them_from_run(memkit, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cli_probe.py").write_text(
        "from memkit.specs.errors import KernelError\n"
        "def run(size: int = 1, fail: bool = False) -> int:\n"
        "    if fail:\n        raise KernelError('no device')\n"
        "    print('size', size)\n    return size\n"
    )
    sys.path.insert(0, str(Path.cwd()))
    monkeypatch.setattr(cli_tools, "OWN_OPTIONS", {"probe": "cli_probe"})
    monkeypatch.setitem(cli_tools.HELP, "probe", "Probes.")
    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))
    result = memkit("probe", "--size", "3")
    assert result.code == 3 and result.out == "size 3\n"
    assert memkit("probe", "--size", "0").code == 0 and "--fail" in memkit("probe", "--help").out
    assert (memkit("probe", "--size", "x").code, memkit("probe", "--siz", "1").code, memkit("probe", "more").code) == (2, 2, 2)
    assert "KernelError" in memkit("probe", "--fail").err


def test_list_and_help_do_without_torch() -> None:
    code = (
        "import sys\nfrom memkit import cli\n"
        "for args in (['list'], ['--help']):\n"
        "    try:\n        cli.main(args)\n    except SystemExit as e:\n        assert not e.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m memkit.cli list | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
