"""The two sides of a comparison as seen from here: a worker process each, and the environment that the peers live in."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE / ".venv"
PEERS = HERE / "peers.txt"
REST = 0.02  # seconds before a run, in which the other side's threads go to sleep


class Missing(Exception):
    """A measurement that cannot be made here, and why."""


class Worker:
    """A process that runs cases: `worker.py` under some Python. Use it in a `with`."""

    def __init__(self, python: str | Path, threads: int) -> None:
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [str(python), str(HERE / "worker.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env
        )

    def ask(self, do: str, **order: Any) -> Any:
        """Give one order and wait for its answer.

        Raises:
            Missing: what went wrong in the worker.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise Missing(f"{do} {order.get('key', '')}: the process ended with code {self._process.wait()}; {self._last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            raise Missing(" ".join(reply["error"].split())[:200])
        return reply["ok"]

    def load(self, key: str, module: str, case: str, **args: Any) -> dict[str, Any]:
        """Make a case ready; what it says of itself."""
        return self.ask("load", key=key, module=module, case=case, args=args)

    def runner(self, key: str, mode: str = "both") -> Callable[[], float]:
        """A function that does one run and returns the seconds it took there."""

        def run() -> float:
            time.sleep(REST)
            return self.ask("run", key=key, mode=mode)

        return run

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return next((row for row in reversed(self._errors.read().splitlines()) if row.strip()), "no message")[:200]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def peers_python(say: Callable[[str], None]) -> Path:
    """The Python of the peers' environment, which is made on first use and again when `peers.txt` changes.

    Raises:
        Missing: where it cannot be made: no packages to be had, or a Python that the pins do not know.
    """
    python = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp, want = ENVIRONMENT / ".installed", hashlib.sha256(PEERS.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == want:
        return python
    say(f"setting up {ENVIRONMENT.relative_to(HERE.parent)} with what is compared (PyTorch is large: this takes minutes)")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    steps = [[sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], [*pip, "--constraint", str(PEERS), "torch", "numpy"]]
    steps.append([*pip, "--no-deps", "--requirement", str(PEERS)])  # all they import is listed; some ask for far more than they use
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            last = next((row for row in reversed((done.stderr or done.stdout).splitlines()) if row.strip()), "no message")
            raise Missing(f"the peers' environment could not be made: {last[:200]}")
    stamp.write_text(want)
    return python
