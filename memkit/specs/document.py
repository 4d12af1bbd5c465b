"""YAML text -> plain data that remembers where each value stood. No torch, no validation: the first step of `io`.

YAML 1.2 core schema. Tags, merge keys, several documents, keys that are not strings and numbers that are not finite are refused; an
alias repeats its anchor's value, within the limits on nodes and depth.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scanner import Scanner

from .errors import SpecError, near

PRESETS = Path(__file__).with_name("presets")
# From linear attention to deep memory; presets not named here follow in alphabetical order.
ORDER = (
    "linear_attention", "retnet", "gla", "swla", "dla", "deltanet", "gated_deltanet", "kda", "titans", "titans_linear", "omeganet", "atlas",
    "atlas_plus", "exp_attention", "deep_transformer", "swdt", "dot", "dot_linear", "ttt_linear", "ttt_mlp",
)

MAX_BYTES = 128 * 1024  # what a pure-Python scanner reads in well under a second
MAX_NODES = 5_000
MAX_DEPTH = 20
MAX_DIGITS = 40
BAD_KEY = "?"
TOO_DEEP = f"more than {MAX_DEPTH} levels inside each other"

Key = str | int
KeyPath = tuple[Key, ...]

NULL = re.compile(r"(?:~|null|Null|NULL)?\Z")
BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
NOT_FINITE = re.compile(r"[-+]?(?:\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")


def presets() -> tuple[str, ...]:
    """Names of the specs shipped with memkit, from linear attention to deep memory."""
    found = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    return tuple([n for n in ORDER if n in found] + [n for n in found if n not in ORDER])


@dataclass
class Document:
    """Plain data and where it stood.

    `data` holds dicts, lists, strings, bools, ints, floats and None. `values` and `keys` map a path in `data` to file:line:column of
    the value and of its key; what came from Python has no entry and is named by its dotted path.
    """

    data: dict[str, Any]
    values: dict[KeyPath, str] = field(default_factory=dict)
    keys: dict[KeyPath, str] = field(default_factory=dict)
    python: set[KeyPath] = field(default_factory=set)  # parts set from Python, over a file's

    def where(self, path: KeyPath, *, key: bool = False) -> str:
        """file:line:column of the value at `path` (of its key if `key`), or of the nearest section around it that has a place."""
        if key and path in self.keys:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            if path[:end] in self.python:
                break
            if path[:end] in self.values:
                return self.values[path[:end]]
        return dotted(path)

    def move(self, path: KeyPath, source: Document, at: KeyPath) -> None:
        """Take over the places below `at` in `source` as those below `path`."""
        self.forget(path)
        for mine, theirs in ((self.values, source.values), (self.keys, source.keys)):
            mine.update({path + p[len(at) :]: where for p, where in theirs.items() if p[: len(at)] == at})
        self.python |= {path + p[len(at) :] for p in source.python if p[: len(at)] == at}

    def forget(self, path: KeyPath) -> None:
        """Drop the places at and below `path`."""
        for places in (self.values, self.keys):
            for p in [p for p in places if p[: len(path)] == path]:
                del places[p]
        self.python = {p for p in self.python if p[: len(path)] != path}


def dotted(path: KeyPath) -> str:
    return ".".join(str(p) for p in path)


def shown(value: Any, limit: int = 60) -> str:
    """A value as YAML would write it on one line, cut short."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k}: {shown(v)}" for k, v in list(value.items())[:8]) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(v) for v in value[:8]) + "]"
    elif isinstance(value, str):
        text = value[:limit] if re.fullmatch(r"[A-Za-z_][\w ./()+*^-]*", value[:limit]) else repr(value[: limit + 1])
    elif isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        text = "a number of many digits"
    else:
        text = str(value) if isinstance(value, int | float) else f"a value of type {type_name(value)}"  # its own text may raise
    return text if len(text) <= limit else text[: limit - 3] + "..."


def type_name(value: Any) -> str:
    """The name of a value's type, with its module where it is none of Python's own."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"


NO_TEXT = "text without half of a surrogate pair"


def is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_file(path: Path) -> str:
    """The text of a spec file; anything but a readable regular UTF-8 file of at most MAX_BYTES is a SpecError."""
    where = str(path) if str(path).isprintable() and len(str(path)) < 1000 else repr(str(path)[:60])
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            what = "a directory" if stat.S_ISDIR(info.st_mode) else "no regular file"
            raise SpecError(f"{where} is {what}", "a YAML file", "", where)
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"no file {where}", "a YAML file that exists", _near_file(path), where) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"{where} cannot be read: {reason}", "a readable YAML file", "", where) from None
    if len(raw) > MAX_BYTES:
        raise SpecError(f"more than {MAX_BYTES // 1024} KiB", "a spec: a few dozen lines of YAML", "", where)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise SpecError(got, "text in UTF-8", "save the file as UTF-8", where) from None


def _near_file(path: Path) -> str:
    try:
        return near(path.name, sorted(p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))[:500])
    except OSError:
        return ""


def parse_text(text: str, name: str) -> Document:
    """A document from YAML text, which must be a mapping; `name` stands for the file in every place. Raises all mistakes together."""
    reader = _read(text, name)
    return Document(reader.data, reader.values, reader.keys)


def parse_value(text: str, name: str) -> Any:
    """One YAML value of any type: a scalar, or a list or mapping on one line. The empty text is null."""
    return _read(text, name, mapping=False).data if text.strip() else None


def _read(text: str, name: str, mapping: bool = True) -> _Reader:
    if len(text) > MAX_BYTES:
        raise SpecError(f"more than {MAX_BYTES // 1024} KiB", "a spec: a few dozen lines of YAML", "", name)
    reader = _Reader(text, name)
    try:
        reader.document(mapping)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or "not YAML").split())
        reader.problems.append(SpecError(problem, "YAML", "", reader.place(mark) if mark else name))
    except YAMLError as error:  # characters that YAML does not allow
        position = getattr(error, "position", 0) or 0
        line, column = text.count("\n", 0, position) + 1, position - (text.rfind("\n", 0, position) + 1) + 1
        reader.problems.append(SpecError("a character that YAML does not allow", "printable text", "", f"{name}:{line}:{column}"))
    if reader.problems:
        raise SpecError.several(reader.problems)
    return reader


class _Scanner(Scanner):
    """Stops at deep nesting: the scanner looks ahead of the parser, at a cost that grows with the square of the depth."""

    def fetch_flow_collection_start(self, *args: Any, **options: Any) -> None:
        if len(self.flow_context) > MAX_DEPTH:
            raise MarkedYAMLError(problem=TOO_DEEP, problem_mark=self.reader.get_mark())
        super().fetch_flow_collection_start(*args, **options)


class _Reader:
    """One pass over the parser's events, building data and places."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.data: Any = None
        yaml = YAML(typ="safe", pure=True)
        yaml.Scanner = _Scanner
        self.events: Iterator[Any] = iter(yaml.parse(text))
        self.values: dict[KeyPath, str] = {}
        self.keys: dict[KeyPath, str] = {}
        self.problems: list[SpecError] = []
        self.anchors: dict[str, tuple[Any, int, int]] = {}  # name -> value, nodes in it, levels in it
        self.nodes = 0

    def place(self, mark: Any) -> str:
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}"

    def next(self) -> Any:
        return next(self.events)

    def document(self, mapping: bool) -> None:
        expected = "a mapping such as `memory: linear`"
        first = None
        while True:
            event = self.next()
            kind = type(event).__name__
            if kind == "StreamEndEvent":
                break
            if kind == "DocumentStartEvent":
                if first is not None:
                    raise SpecError("a second document", "one spec a file", "remove the line ---", self.place(event.start_mark))
                first = self.next()
                self.data, _ = self.value(first, (), 0)
        if first is None:
            raise SpecError("an empty file", expected, "memkit new writes a first spec", f"{self.name}:1:1")
        data = self.data
        if mapping and not isinstance(data, dict) and not self.problems:
            empty = data is None
            got = "an empty file" if empty else f"a list at the top level: {shown(data)}" if isinstance(data, list) else shown(data)
            raise SpecError(got, expected, "", f"{self.name}:1:1" if empty else self.place(first.start_mark))

    def fail(self, event: Any, got: str, expected: str, hint: str = "") -> None:
        self.problems.append(SpecError(got, expected, hint, self.place(event.start_mark)))

    def count(self, event: Any, nodes: int, depth: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise SpecError(f"more than {MAX_NODES} values, aliases counted in full", "a spec", "", self.place(event.start_mark))
        if depth > MAX_DEPTH:
            raise SpecError(TOO_DEEP, "a spec", "", self.place(event.start_mark))

    def value(self, event: Any, path: KeyPath, depth: int) -> tuple[Any, int]:
        """The value that starts at `event`, and how many levels it holds."""
        kind = type(event).__name__
        if kind == "AliasEvent":
            return self.alias(event, path, depth)
        self.count(event, 1, depth)
        self.values[path] = self.place(event.start_mark)
        before = self.nodes - 1
        if event.tag is not None:
            self.fail(event, f"the tag {event.tag}", "plain YAML without tags", "remove the tag")
        if kind == "ScalarEvent":
            value, levels = self.scalar(event), 0
        elif kind == "SequenceStartEvent":
            value, levels = self.sequence(path, depth)
        else:
            value, levels = self.mapping(path, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.nodes - before, levels)
        return value, levels

    def alias(self, event: Any, path: KeyPath, depth: int) -> tuple[Any, int]:
        self.values[path] = self.place(event.start_mark)
        if event.anchor not in self.anchors:
            self.count(event, 1, depth)
            expected = "an anchor that stands before it and outside it"
            self.fail(event, f"the alias *{event.anchor}", expected, near(event.anchor, self.anchors))
            return None, 0
        value, nodes, levels = self.anchors[event.anchor]
        self.count(event, nodes, depth + levels)
        return value, levels

    def sequence(self, path: KeyPath, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        levels = 0
        while type(event := self.next()).__name__ != "SequenceEndEvent":
            value, below = self.value(event, (*path, len(items)), depth + 1)
            items.append(value)
            levels = max(levels, below)
        return items, levels + 1

    def mapping(self, path: KeyPath, depth: int) -> tuple[dict[str, Any], int]:
        items: dict[str, Any] = {}
        levels = 0
        while type(event := self.next()).__name__ != "MappingEndEvent":
            key = self.key(event, path, depth)
            inner = (*path, key)
            if key in items and key != BAD_KEY:
                self.fail(event, f"{key} a second time", f"one {key}; the first is at {self.keys.get(inner)}", "remove one of the two")
            self.keys.setdefault(inner, self.place(event.start_mark))
            value, below = self.value(self.next(), inner, depth + 1)
            items.setdefault(key, value)
            levels = max(levels, below)
        return items, levels + 1

    def key(self, event: Any, path: KeyPath, depth: int) -> str:
        """A key's text; a key that is no plain string is reported and stands in as BAD_KEY."""
        key, _ = self.value(event, (*path, BAD_KEY), depth + 1)
        self.values.pop((*path, BAD_KEY), None)
        if key == "<<" and getattr(event, "style", None) is None:
            self.fail(event, "the merge key <<", "plain keys", "extends: a preset or a file")
            return BAD_KEY
        if not isinstance(key, str):
            self.fail(event, f"the key {shown(key)}", "a key that is a word", "")
            return BAD_KEY
        return key

    def scalar(self, event: Any) -> Any:
        text = event.value
        if not is_text(text):
            self.fail(event, shown(text), NO_TEXT)
        if not event.implicit[0]:  # quoted or block: a string
            return text
        if NULL.match(text):
            return None
        if BOOL.match(text):
            return text.lower() == "true"
        if NOT_FINITE.match(text):
            self.fail(event, text, "a finite number")
            return 0
        if not (INT.match(text) or FLOAT.match(text)):
            return text
        if len(text) > MAX_DIGITS:
            self.fail(event, f"a number of {len(text)} characters", f"at most {MAX_DIGITS}")
            return 0
        if INT.match(text):
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        number = float(text)
        if not math.isfinite(number):
            self.fail(event, text, "a finite number")
            return 0
        return number
