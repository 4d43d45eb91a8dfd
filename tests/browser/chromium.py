"""Headless Chromium, driven by its own protocol over a pair of pipes: nothing to install but the browser."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 60.0


def find() -> str | None:
    """The browser: the environment's KVROUTE_CHROMIUM, or one on the path."""
    named = os.environ.get("KVROUTE_CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. `events` are all that it told so far, by their method."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._sent, self._session = b"", 0, None
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's answer; RuntimeError if the browser refuses it, TimeoutError if it says nothing."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message; events are kept as well."""
        until = time.monotonic() + WAIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._from, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser says nothing" if not ready else "the browser is gone")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(message)
        if "method" in found:
            self.events.append((found["method"], found.get("params", {})))
        return found

    def open(self, path: Path, width: int, height: int, dark: bool = False) -> None:
        """Load a file in a window of that size, in CSS pixels; a narrow one is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._read()

    def evaluate(self, expression: str) -> Any:
        """Its value, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Of the window, from where it is scrolled to."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def pdf(self) -> bytes:
        """As printed on A4."""
        answer = self.call("Page.printToPDF", preferCSSPageSize=False, paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(answer["data"])

    def told(self, method: str) -> list[dict[str, Any]]:
        return [parameters for name, parameters in self.events if name == method]


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile and one tab; ended, with all its processes, at the end."""
    name = find()
    if name is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed, and KVROUTE_CHROMIUM names none")
    its_in, to_browser = os.pipe()
    from_browser, its_out = os.pipe()
    command = [name, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    command += ["--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    # The browser reads from descriptor 3 and writes to 4; by their paths, since a shell's `<&` takes a digit.
    with_pipes = ["sh", "-c", f'exec "$@" 3</proc/self/fd/{its_in} 4>/proc/self/fd/{its_out}', "sh", *command]
    process = subprocess.Popen(
        with_pipes, pass_fds=(its_in, its_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(its_in)
    os.close(its_out)
    try:
        page = Page(to_browser, from_browser)
        yield page
    finally:
        # It ends by itself, and its children with it, when nobody is there to command it.
        os.close(to_browser)
        os.close(from_browser)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
