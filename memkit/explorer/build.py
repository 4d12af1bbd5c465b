"""What the explorer shows, computed: every spec once, texts taken apart into lines that are stored once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from memkit.compiler.pipeline import compile_rule
from memkit.drawing import visualize
from memkit.drawing_files import inline
from memkit.equations import equation_of
from memkit.specs.errors import MemkitError
from memkit.specs.io import dump_yaml
from memkit.specs.layer import LayerSpec

from .knobs import FIELDS, Turn, settings, turns
from .mathml import equations
from .reductions import Reductions

WIDTH = 16  # of keys and values in the emitted code


class Builder:
    """Collects the page's data. `configs` are specs, each once however many ways lead to it."""

    def __init__(self, names: Iterable[str]) -> None:
        self.reductions = Reductions(names)
        self.lines: dict[str, int] = {}
        self.texts: dict[str, int] = {}
        self.packed: list[list[int]] = []
        self.configs: list[dict[str, Any]] = []
        self.known: dict[str, int] = {}

    def build(self, specs: list[LayerSpec], *, progress: bool = True) -> dict[str, Any]:
        """Everything the page shows, as plain data."""
        from memkit import __version__

        around = [list(turns(spec)) for spec in specs]
        found = []
        with _bar(progress, sum(len(turned) + 1 for turned in around)) as step:
            for spec, turned in zip(specs, around, strict=True):
                base = self.config(spec, spec.name)
                step()
                found.append(
                    {
                        "name": spec.name,
                        "source": spec.source,
                        "settings": settings(spec),
                        "config": base,
                        "turns": self._turns(turned, step),
                    }
                )
        knobs = [[path, label] for path, (label, _) in FIELDS.items()]
        return {
            "version": __version__,
            "width": WIDTH,
            "knobs": knobs,
            "presets": found,
            "configs": self.configs,
            "texts": self.packed,
            "lines": list(self.lines),
        }

    def _turns(self, turned: list[Turn], step: Any) -> dict[str, dict[str, int | str]]:
        found: dict[str, dict[str, int | str]] = {}
        for turn in turned:
            found.setdefault(turn.path, {})[turn.value] = turn.error if turn.spec is None else self.config(turn.spec)
            step()
        return found

    def config(self, spec: LayerSpec, own: str = "") -> int:
        """The number of a spec; computed when it is new."""
        key = spec.model_dump_json() + own
        if key not in self.known:
            made = self._config(spec, own)
            self.known[key] = len(self.configs)
            self.configs.append(made)
        return self.known[key]

    def _config(self, spec: LayerSpec, own: str) -> dict[str, Any]:
        made: dict[str, Any] = {
            "equation": self.text(equations(equation_of(spec))),
            "rule": self.text(_small(visualize(spec).pipe("svg", encoding="utf-8"))),
            "yaml": self.text(_yaml(spec)),
        }
        try:
            rule = compile_rule(spec, WIDTH, WIDTH)
        except MemkitError as error:
            return {**made, "error": str(error)}
        reduced = [[name, [f"{path}={value}" for path, value in given.items()]] for name, given in self.reductions.of(spec, own)]
        return {**made, "plan": self.text(rule.explain()), "source": self.text(rule.source), "reduces": reduced}

    def text(self, text: str) -> int:
        """The number of a text."""
        if text not in self.texts:
            self.texts[text] = len(self.packed)
            self.packed.append([self.lines.setdefault(line, len(self.lines)) for line in text.splitlines()])
        return self.texts[text]


def _small(svg: str) -> str:
    """An svg for the page, without comments and without what its style sheet says; the drawing's title is the page's."""
    svg = re.sub(r"<!--.*?-->\s*|<title>.*?</title>\s*| xml:space=\"preserve\"| id=\"[^\"]*\"", "", inline(svg), flags=re.S)
    return svg.replace(' font-family="Helvetica,sans-Serif"', "")


def _yaml(spec: LayerSpec) -> str:
    """The spec as YAML, without what the page shows elsewhere."""
    return dump_yaml(spec.model_copy(update={"source": ""}), minimal=True)


@contextmanager
def _bar(show: bool, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, where a person watches; else one line that says what is being waited for; or nothing."""
    from rich.console import Console

    from memkit.benchmark import progress

    console = Console(stderr=True)
    if not (show and console.is_terminal):
        if show:
            print(f"explorer: computing {total} specs, which takes minutes for all presets", file=sys.stderr)
        yield lambda: None
        return
    with progress(console) as bar:
        task = bar.add_task("specs", total=total)
        yield lambda: bar.advance(task)
