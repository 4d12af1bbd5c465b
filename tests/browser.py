"""A headless Chromium driven through chromedriver's HTTP interface: what the page tests need and no more."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "ArrowDown": "\ue015", "ArrowUp": "\ue013"}


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    gone = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(gone)} not here (apt-get install chromium chromium-driver)" if gone else ""


def without_font() -> str:
    """Why boxes sized for Helvetica cannot be judged here; empty if a font has its widths."""
    match = shutil.which("fc-match")
    found = subprocess.run([match, "Helvetica"], capture_output=True, text=True).stdout if match else ""
    fits = any(name in found for name in ("Helvetica", "Arial", "Arimo", "Liberation Sans", "Nimbus Sans", "Heros"))
    return "" if fits else f"no font with Helvetica's widths, only {found.strip() or 'unknown ones'} (apt-get install fonts-liberation)"


class Browser:
    """One window. `dark`: what the page is told the person prefers."""

    def __init__(self, profile: Path, size: tuple[int, int] = (1280, 900), dark: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait()
        flags = [*FLAGS, f"--user-data-dir={profile}", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": flags, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self.session = f"/session/{self.call('POST', '/session', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 500}
        self.call("POST", f"{self.session}/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def _wait(self) -> None:
        for _ in range(200):
            try:
                self.call("GET", "/status")
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise RuntimeError("chromedriver does not answer")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.call("DELETE", self.session)
        finally:
            self.process.terminate()
            self.process.wait(10)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, address: str, ready: str) -> None:
        """Open an address and wait until the script `ready` is true."""
        self.call("POST", f"{self.session}/url", {"url": address})
        self.until(ready)

    def until(self, script: str) -> None:
        for _ in range(200):
            if self.run(f"return {script}"):
                return
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}")

    def run(self, script: str, *args: Any) -> Any:
        """What a script returns."""
        return self.call("POST", f"{self.session}/execute/sync", {"script": script, "args": list(args)})

    def press(self, *names: str) -> None:
        """Keys, by name or letter, to whatever has the focus."""
        strokes = [{"type": kind, "value": KEYS.get(name, name)} for name in names for kind in ("keyDown", "keyUp")]
        self.call("POST", f"{self.session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", f"{self.session}/screenshot")))

    def errors(self) -> list[str]:
        """What the page wrote to its console as an error or warning since the last call."""
        found = self.call("POST", f"{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] in ("SEVERE", "WARNING")]
