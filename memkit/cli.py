"""The command line: `memkit list | show | validate | new` here, the commands that run layers in `cli_tools`.

Nothing here imports torch before a command needs a spec. A MemkitError becomes its message on stderr and exit code 2.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memkit.specs.document import PRESETS, parse_text, parse_value, presets, read_file
from memkit.specs.errors import MemkitError, SpecError

if TYPE_CHECKING:
    from memkit.specs.layer import LayerSpec

app = typer.Typer(
    name="memkit",
    help="Write a recurrent memory layer down as a spec; check it, explain it, draw it and compile it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override, such as window.size=1. Repeatable.")]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Python module with further kinds, imported first. Repeatable."),
]
Spec = Annotated[str, typer.Argument(metavar="SPEC", help="A preset, or a file .yaml.")]


def load(source: str, sets: Iterable[str] | None = (), imports: Iterable[str] | None = ()) -> LayerSpec:
    """The spec a command is given, with its `--set` and `--import`."""
    overrides = parse_sets(sets)
    import_modules(imports)
    from memkit.specs.io import load_spec

    return load_spec(as_source(source), overrides)


def as_source(text: str) -> str | Path:
    """A preset's name or a path; a file that exists needs no .yaml at its end."""
    return text if text in presets() or "\0" in text or not os.path.lexists(text) else Path(text)


def parse_sets(sets: Iterable[str] | None, option: str = "--set") -> Mapping[str, object]:
    """`--set PATH=VALUE`, the value read as one YAML value; of equal paths the last counts."""
    overrides: dict[str, object] = {}
    for item in sets or ():
        path, equals, value = item.partition("=")
        if not equals or not path.strip():
            raise SpecError(item, "PATH=VALUE", f"{option} window.size=1", option)
        overrides[path.strip()] = parse_value(value, f"{option} {path.strip()}")
    return overrides


def import_modules(names: Iterable[str] | None) -> None:
    """Import third-party modules, from the current directory too. What goes wrong in one is shown with its file and line."""
    for name in names or ():
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            importlib.import_module(name)
        except MemkitError as error:
            raise error.at(f"--import {name}") from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            hint = f"a module's name: {Path(name).stem}" if name.endswith(".py") or "/" in name else ""
            raise SpecError(_plainly(error), "a Python module that imports", hint, f"--import {name}") from None


def _plainly(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename and f.filename != __file__]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def _version(show: bool) -> None:
    if show:
        typer.echo(f"memkit {importlib.metadata.version('memkit-layers')}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


@app.command("list")
def list_command(
    kinds: Annotated[bool, typer.Option("--kinds", help="Every kind with its fields, their ranges and defaults.")] = False,
    imports: Imports = None,
) -> None:
    """List the presets, each with its source; or every kind a spec can name, with its fields."""
    import_modules(imports)
    if not (kinds or imports):
        _table(("preset", "source"), _presets())
        return
    from memkit import cli_kinds

    _table(("kind and its fields", "what it is"), list(cli_kinds.rows()))


def _presets() -> list[tuple[str, str]]:
    rows = []
    for name in presets():
        path = PRESETS / f"{name}.yaml"
        source = str(parse_text(read_file(path), str(path)).data.get("source", ""))
        rows.append((name, source.partition(": ")[0].partition("\n")[0]))
    return rows


def _table(heads: tuple[str, str], rows: list[tuple[str, str]]) -> None:
    """Columns; with colours and headings where a person reads them."""
    if not sys.stdout.isatty():
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            typer.echo(f"{name:<{width}}  {text}".rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=None, pad_edge=False)
    for name, text in rows:
        table.add_row(Text(name, style="" if name.startswith(" ") else "bold"), Text(text))
    Console().print(table)


@app.command()
def show(
    spec: Spec,
    full: Annotated[bool, typer.Option("--full", help="Every field, those at their default too.")] = False,
    sets: Sets = None,
    imports: Imports = None,
) -> None:
    """Print a spec as YAML, with `extends` and overrides worked in."""
    loaded = load(spec, sets, imports)
    from memkit.specs.io import dump_yaml

    text = dump_yaml(loaded, minimal=not full)
    if not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, "yaml", background_color="default", word_wrap=True))


@app.command()
def validate(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="Presets or files.")],
    sets: Sets = None,
    imports: Imports = None,
) -> None:
    """Check specs: of every file each field that is wrong or, once all are right, each way in which they do not fit together.

    The exit code is 2 if anything is wrong.
    """
    overrides = parse_sets(sets)
    import_modules(imports)
    from memkit.specs.io import load_spec

    failed = 0
    for source in specs:
        try:
            load_spec(as_source(source), overrides)
        except MemkitError as error:
            failed += 1
            typer.echo(str(error), err=True)
        else:
            typer.echo(f"{source}: ok")
    if failed:
        raise typer.Exit(2)


@app.command()
def new(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to write, or - for the terminal.")],
    base: Annotated[str, typer.Option("--from", metavar="SPEC", help="Start from a preset or a file.")] = "deltanet",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
    sets: Sets = None,
    imports: Imports = None,
) -> None:
    """Write a commented spec that names every field and every kind, ready to be changed."""
    loaded = load(base, sets, imports)
    from memkit.cli_new import scaffold, write

    if file == "-":
        typer.echo(scaffold(loaded, None), nl=False)
    else:
        write(loaded, Path(file), force)
        typer.echo(f"{file}: written; next: memkit validate {file}")


def main(args: list[str] | None = None) -> Any:
    """Entry of the console script; always ends in SystemExit."""
    from memkit import cli_tools

    cli_tools.register(app)
    try:
        app(args=args, prog_name="memkit")
    except MemkitError as error:
        typer.echo(str(error), err=True)
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
