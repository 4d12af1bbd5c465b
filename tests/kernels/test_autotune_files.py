"""What tuning keeps on the disk: nothing that lies there crashes a call, brings in code or tiles, or makes two processes disagree."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memkit.compiler import autotune
from memkit.compiler.autotune import Job, Trial, Tuned
from memkit.compiler.kernels.settings import Configs
from memkit.compiler.triton_rule import TritonRule

from .tuning import OPTIONS, Clock, files, forget, forward, job, on, used


class Payload:
    """Does something when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def spoiled(kind: str, path: Path) -> bytes:
    """Contents that are not what this key's file should have."""
    good = json.loads(path.read_text())
    good["configs"] = good["trials"][3]["configs"]  # which would be seen if it were believed
    if kind == "another key":
        good["key"] = "0" * 64
    elif kind == "no option":
        good["configs"]["loop"]["rows"] = 7
    elif kind == "no number":
        good["configs"]["loop"]["rows"] = "__import__('os').abort()"
    elif kind == "a later format":
        good["format"] = 2
    elif kind == "more":
        good["more"] = 1
    whole = json.dumps(good).encode()
    return {
        "empty": b"", "half": whole[:300], "no text": b"\x00\xff" * 40, "a list": b"[1, 2]", "deep": b"[" * 100_000,
        "large": whole + b" " * autotune.LARGEST, "a pickle": pickle.dumps(Payload(path.parent / "touched")),
    }.get(kind, whole)  # fmt: skip


KINDS = (
    "empty", "half", "no text", "a list", "deep", "large", "a pickle", "another key", "no option", "no number", "a later format", "more",
)  # fmt: skip


def test_the_spoiled_file_would_be_believed_if_it_were_not_spoiled(
    clock: Clock, rule: TritonRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch)
    forward(rule)
    (path,) = files(tmp_path)
    path.write_bytes(spoiled("not at all", path))
    forget(rule)
    forward(rule)
    assert used(rule) == OPTIONS[3] and clock.calls == len(OPTIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_corrupt_and_foreign_files_are_tuned_over(
    kind: str, clock: Clock, rule: TritonRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch)
    forward(rule)
    (path,) = files(tmp_path)
    good = path.read_bytes()
    path.write_bytes(spoiled(kind, path))
    forget(rule)
    forward(rule)
    assert clock.calls == 2 * len(OPTIONS) and used(rule) == OPTIONS[2]
    assert files(tmp_path) == [path] and path.read_bytes() == good


def test_a_disk_that_cannot_be_written(clock: Clock, rule: TritonRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch)
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MEMKIT_CACHE", str(blocked))
    forward(rule)
    forward(rule)
    assert clock.calls == len(OPTIONS) and used(rule) == OPTIONS[2] and "not kept on the disk" in rule.explain()
    assert blocked.read_text() == ""


def test_a_folder_where_the_file_should_be(clock: Clock, tmp_path: Path) -> None:
    own = job()
    path = tmp_path / f"{own.key}.json"
    (path / "inside").mkdir(parents=True)
    assert autotune.save(path, tuned(own, OPTIONS[1]), own) is None
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def tuned(own: Job, configs: Configs) -> Tuned:
    return Tuned(key=own.key, function="chunks", about=own.about, configs=configs, trials=(Trial(configs=configs, milliseconds=1.0),))


def test_who_writes_first_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = job()
    path = tmp_path / "new" / f"{own.key}.json"
    first = autotune.save(path, tuned(own, OPTIONS[1]), own)
    second = autotune.save(path, tuned(own, OPTIONS[2]), own)
    assert first == second == tuned(own, OPTIONS[1]) and [p.name for p in path.parent.iterdir()] == [path.name]

    def no_link(*_: object) -> None:
        raise OSError("no links on this disk")

    monkeypatch.setattr(os, "link", no_link)
    path.unlink()
    assert autotune.save(path, tuned(own, OPTIONS[3]), own) == tuned(own, OPTIONS[3])


RACE = """
import sys, time
from pathlib import Path
import torch
from memkit.compiler import autotune
from memkit.compiler.pipeline import compile_rule
from memkit.compiler.triton_rule import TritonRule
from tests.cases import draw, small
own, other, liked = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
asked = []
def measure(run, device):
    own.touch()
    while not other.exists():  # both search before either writes
        time.sleep(0.01)
    asked.append(1)
    return 1.0 if len(asked) - 1 == liked else 2.0
autotune.measure = measure
rule = TritonRule(compile_rule(small("retnet"), 4, 4, backend="torch"), pinned=True)
with torch.no_grad():
    draw(rule, B=1, T=4, H=1, dtype=torch.float32).run(rule)
print(len(asked), rule.kernels.ran["chunks", torch.float32].configs)
"""


def test_two_processes_that_tune_at_once_agree(tmp_path: Path) -> None:
    marks = [str(tmp_path / "one"), str(tmp_path / "two")]
    kept = {**os.environ, "MEMKIT_AUTOTUNE": "1", "MEMKIT_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, marks[i], marks[1 - i], str(i + 1)],
            env={**kept, "PYTHONHASHSEED": str(i)}, cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    said = [p.communicate(timeout=300) for p in started]
    assert all(p.returncode == 0 for p in started), said
    answers = [out.strip() for out, _ in said]
    assert answers[0] == answers[1] and answers[0] in (f"4 {OPTIONS[1]}", f"4 {OPTIONS[2]}")
    assert [p.suffix for p in files(tmp_path)] == [".json"]


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({"MEMKIT_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a/autotune"),
        ({"MEMKIT_CACHE": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/memkit/autotune"),
        ({"XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/memkit/autotune"),
    ],
)
def test_where_files_lie(variables: dict[str, str], want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMKIT_CACHE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert autotune.folder() == Path(want)
