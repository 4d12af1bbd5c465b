"""Commands that run something: explain, graph, emit, equiv, and those whose options are their function's own (bench, doctor, ..).

Each is thin, imports what it calls when it is called, and exists only if what it calls does.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import memkit
from memkit.cli import Imports, Sets, Spec, load, parse_sets
from memkit.specs.errors import SpecError

# command -> module whose `run` it is; `run`'s signature gives the options, its docstring the help, an int it returns the exit code
OWN_OPTIONS = {"bench": "memkit.benchmark", "doctor": "memkit.doctor", "kernels": "memkit.kernels"}
HELP = {
    "bench": "Measure speed and memory.",
    "doctor": "Say what works on this machine.",
    "kernels": "Compile the GPU kernels ahead of time: registers, spills, shared memory.",
}
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


def register(app: typer.Typer) -> None:
    """Add the commands that can run and are not there yet."""
    there = {command.name for command in app.registered_commands}
    found: dict[str, Any] = {}
    for face, name, command in (("explain", "explain", explain), ("visualize", "graph", graph), ("equivalent", "equiv", equiv)):
        if face in memkit.__all__:
            found[name] = command
    for module, name, command in (("memkit.compiler.pipeline", "emit", emit), ("memkit.demo", "demo", demo)):
        if find_spec(module) is not None:
            found[name] = command
    for name, command in found.items():
        if name not in there:
            app.command(name)(command)
    for name, module in OWN_OPTIONS.items():
        if find_spec(module) is not None and name not in there:
            _add_own(app, name, module)


def _add_own(app: typer.Typer, name: str, module: str) -> None:
    """A command whose arguments go as they are to a parser made from `run`, once `module` is imported."""

    def command(context: typer.Context) -> None:
        inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)
        inner.command(help=HELP[name])(importlib.import_module(module).run)
        code = inner(args=context.args, prog_name=f"memkit {name}", standalone_mode=False)
        raise typer.Exit(code if isinstance(code, int) else 0)

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=HELP[name], context_settings=settings)(command)


def explain(spec: Spec, sets: Sets = None, imports: Imports = None) -> None:
    """Print the equation, what is inner and outer, the plan and why others refused, state and cost."""
    typer.echo(memkit.explain(load(spec, sets, imports)))


def graph(
    spec: Spec,
    view: Annotated[str, typer.Option(help="rule, plan or layer; rule unless given.")] = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File .svg, .png, .pdf, .dot or .html; the DOT text is printed if none. "
                     "An .html without --view is the explorer: every preset, with knobs to turn."),
    ] = None,
    after: Annotated[str, typer.Option(metavar="PASS", help="View plan: the graph after this pass (lower, fold, ..).")] = "",
    only: Annotated[str, typer.Option(metavar="PRESETS", help="Explorer: these presets alone, with commas between.")] = "",
    sets: Sets = None,
    imports: Imports = None,
) -> None:
    """Draw a spec: to a file, or as the explorer, a page that opens at this spec and needs no network."""
    loaded = load(spec, sets, imports)
    from memkit.drawing import visualize
    from memkit.drawing_files import content, format_of, save

    kind = "dot" if out is None else format_of(out)
    view = view or ("plan" if after else "")
    if out is not None and kind == "html" and not view:
        from memkit.explorer import explorer

        save(out, explorer(loaded, [name for name in only.split(",") if name] or None).encode())
        return
    drawing = visualize(loaded, view=view or "rule", after=after)
    if out is None:
        typer.echo(drawing.source, nl=False)
    else:
        save(out, content(drawing, kind))


def emit(
    spec: Spec,
    key_dim: Annotated[int, typer.Option(min=1, help="Width of keys, K.")] = 64,
    value_dim: Annotated[int, typer.Option(min=1, help="Width of values, V.")] = 64,
    plan: Annotated[str, typer.Option(help="auto, or a plan to pin.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, torch, native (C++ for CPUs) or triton.")] = "auto",
    sets: Sets = None,
    imports: Imports = None,
) -> None:
    """Print the code that a spec compiles to."""
    from memkit.compiler.native_rule import NativeRule

    rule = memkit.compile(load(spec, sets, imports), key_dim=key_dim, value_dim=value_dim, plan=plan, backend=backend)
    typer.echo(rule.native.module.source if isinstance(rule, NativeRule) else rule.source)


def equiv(
    first: Annotated[str | None, typer.Argument(metavar="A", help="A preset, or a file .yaml.")] = None,
    second: Annotated[str | None, typer.Argument(metavar="B", help="A preset, or a file .yaml.")] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--given", metavar="PATH=VALUE", help="A knob or gate fixed on the side that has it: gates.momentum=0. Repeatable."),
    ] = None,
    lattice: Annotated[bool, typer.Option("--lattice", help="Instead of two specs: which preset becomes which, and under what.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="With --lattice: a drawing, .svg, .png, .pdf or .dot.")] = None,
    imports: Imports = None,
) -> None:
    """Say whether two specs are the same rule, with a proof or a counterexample; the exit code is 1 if they are not."""
    if lattice:
        if first or given or imports:
            raise SpecError("--lattice with specs, --given or --import", "--lattice alone", "", "--lattice")
        _lattice(out)
        return
    if first is None or second is None or out is not None:
        got = "--out without --lattice" if out else "no spec" if first is None else "one spec"
        raise SpecError(got, "two specs, or --lattice", "memkit equiv titans_linear deltanet", "equiv")
    fixed = parse_sets(given, "--given")
    result = _face("equivalent")(load(first, (), imports), load(second, (), imports), given=fixed)
    typer.echo(str(result))
    if not result:
        raise typer.Exit(1)


def _lattice(out: Path | None) -> None:
    from memkit.drawing_dot import draw
    from memkit.drawing_files import format_of, save
    from memkit.lattice import drawing, lattice, table

    kind = "" if out is None else format_of(out)
    if kind == "html":
        raise SpecError(str(out), "a file .svg, .png, .pdf or .dot", "", "--out")
    found = lattice()
    typer.echo(table(found))
    source = drawing(found).source
    if out is None:
        typer.echo(f"\n{source}", nl=False)
    else:
        save(out, source.encode() if kind == "dot" else draw(source, kind))


def demo(
    seconds: Annotated[float, typer.Option(min=0.1, help="Training time of each of the two models.")] = 60.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for specs, weights, metrics, curve and sample.")] = Path("runs/demo"),
    text: Annotated[Path | None, typer.Option(help="Text to train on, instead of Python's own help topics.")] = None,
    seed: Annotated[int, typer.Option(help="Of starts and batches.")] = 0,
) -> None:
    """Explain atlas, check it against the token loop, and train a small model with it on real text."""
    from memkit.demo import run_demo

    raise typer.Exit(run_demo(seconds, out, text=text, seed=seed))


def _face(name: str) -> Any:
    return getattr(memkit, name)
