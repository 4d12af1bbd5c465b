"""Emitted C++ compiled and loaded: once for a source, a compiler and a processor; kept on disk.

Where it sits: above `emit_native`, below `native_rule`. Nothing is compiled before a rule first runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from memkit.specs.errors import KernelError

from .autotune import cache_root

HERE = Path(__file__).parent / "native"
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fopenmp-simd",
)  # fmt: skip
THREADS = {"g++": "GOMP_parallel", "clang": "__kmpc_fork_call"}  # what OpenMP code of a compiler calls
TYPES = {torch.float32: "float", torch.float64: "double"}
SECONDS = 600  # that one compilation may take


@cache
def compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: $CXX with its arguments, or the first of c++, g++ and clang++ that is installed; else None."""
    named = os.environ.get("CXX")
    candidates = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    return next(((path, *rest) for name, *rest in candidates if (path := shutil.which(name))), None)


def obstacle() -> str | None:
    """Why C++ cannot run here, or None."""
    if os.name != "posix":
        return "C++ is compiled on Linux and macOS only"
    return "no C++ compiler is installed" if compiler() is None else None


def unfit(x: torch.Tensor) -> str | None:
    """Why C++ cannot run on x, or None."""
    if x.device.type != "cpu":
        return f"the tensors are on {x.device}"
    return None if x.dtype in TYPES else f"the tensors are {x.dtype}"


@cache
def flags() -> tuple[str, ...]:
    """FLAGS; OpenMP where torch brought what it needs: then its threads are used, and none beside them; and $MEMKIT_CXXFLAGS."""
    kind = "clang" if "clang" in _call("asking the C++ compiler for its version", "--version") else "g++"
    threads = ["-fopenmp"] if hasattr(ctypes.CDLL(None), THREADS[kind]) else []
    return (*FLAGS, *threads, *shlex.split(os.environ.get("MEMKIT_CXXFLAGS", "")))


@cache
def target() -> str:
    """What code is compiled for: the compiler's version and what -march=native stands for on this processor."""
    asked = "asking the C++ compiler for its target"
    return "\n".join(_call(asked, *words) for words in (["--version"], [*flags(), "-dM", "-E", "-x", "c++", os.devnull]))


def folder() -> Path:
    """Where compiled code is kept: memkit's cache, or one of this process where that cannot be written."""
    root = cache_root()
    if root is not None:
        try:
            (root / "native").mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(root / "native", os.W_OK | os.X_OK):
                return root / "native"
        except OSError:
            pass
    return _own_folder()


@cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="memkit-native-"))


def _made(name: str, text: str, real: str, *objects: Path) -> Path:
    """The object file, or library with `objects`, that compiling `text` gives. Two processes may make it at once: the last one's stays."""
    headers = "".join((HERE / h).read_text() for h in ("functions.h", "solve.h", "tables.h", "team.h"))
    key = hashlib.sha256("\n".join([target(), headers, text, real, *map(str, objects), *flags()]).encode()).hexdigest()[:32]
    stem, _, ending = name.rpartition(".")
    path = folder() / f"{stem}-{key}.{ending}"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        source, made, out = Path(scratch) / f"{stem}.cpp", Path(scratch) / f"{stem}.o", Path(scratch) / name
        source.write_text(text)
        _call(f"compiling {stem}", *flags(), f"-Dreal={real}", f"-I{HERE}", "-c", str(source), "-o", str(made))
        if objects:  # linked without -fopenmp: what that needs, torch has loaded
            _call(f"linking {stem}", "-shared", "-pthread", str(made), *map(str, objects), "-o", str(out))
        os.replace(out if objects else made, path)
    return path


def _call(task: str, *arguments: str) -> str:
    """What the compiler prints, called with these arguments."""
    named = compiler()
    if named is None:
        raise KernelError("backend: native, but no C++ compiler is installed", "g++ or clang++, or $CXX", "backend: torch", "backend")
    try:
        done = subprocess.run([*named, *arguments], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{task}: {error}", "a C++ compiler that works", "backend: torch", "backend") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300].strip())
        raise KernelError(f"{task}: {first}", "a C++ compiler that works", "backend: torch", "backend")
    return done.stdout


def library(name: str, source: str, dtype: torch.dtype) -> ctypes.CDLL:
    """The loaded code of an emitted source.

    Raises:
        KernelError: where it cannot be compiled or loaded.
    """
    real = TYPES[dtype]
    products = _made("products.o", (HERE / "products.cpp").read_text(), real)
    path = _made(f"{name}.so", source, real, products)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"loading {path.name}: {error}", "a library that loads", "backend: torch", "backend") from error
