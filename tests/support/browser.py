"""A Chromium without a window that shows one page and answers questions about it, over the pipe of its debugging protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from pathlib import Path

REQUIRED = "TESTS_REQUIRE_BROWSER"
"""Set where the tests have to find a browser, as in `.ci/run`."""
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


class Browser:
    """The browser, with its files in a folder. Skips the test where none is installed; fails it if one is required."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, _NAMES)), None)
        if program is None:
            assert REQUIRED not in os.environ, "no Chromium is installed"
            pytest.skip("no Chromium is installed")
        # It reads descriptor 3 and writes to 4, whatever these are here.
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        script = f'exec {{from}}<&{theirs_in} {{to}}>&{theirs_out}; exec "$@" 3<&$from 4>&$to'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *_OPTIONS, f"--user-data-dir={folder}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb")
        self._asked = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        """What the browser has told unasked, as requests of the network and errors of the page."""

    def __enter__(self) -> Self:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()

    def ask(self, method: str, **parameters: Any) -> Any:
        """Return the result of a command of the protocol; asserts that there is one."""
        self._asked += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._asked, "method": method, "params": parameters, **session}
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._asked:
            self.events.append(answer)
        assert "result" in answer, answer
        return answer["result"]

    def show(self, page: Path, *, width: int, height: int, scheme: str) -> None:
        """Load a page in a window of some pixels, in the colour scheme `light` or `dark`."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, which itself may run no script."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """Return what the window shows, as PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        message = json.loads(data)
        assert isinstance(message, dict)
        return message
