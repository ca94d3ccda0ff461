"""A headless Chromium, through its own DevTools protocol over a pipe; no driver has to be installed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class Browser:
    """One tab. `complaints` are console errors and warnings, uncaught exceptions and failed requests; `asked` all URLs.

    Args:
        home: A folder for the browser's own files.
    """

    def __init__(self, home: Path) -> None:
        assert CHROMIUM
        ours, theirs = os.pipe(), os.pipe()  # it reads commands from its descriptor 3, and answers on 4
        flags = (*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={home}")
        # The shell puts our two descriptors on 3 and 4, whatever numbers they have here.
        words = ["bash", "-c", f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}', "bash", CHROMIUM, *flags, "about:blank"]
        self._process = subprocess.Popen(
            words, pass_fds=(ours[0], theirs[1]), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from, self._rest, self._number = ours[1], theirs[0], b"", 0
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, page: Path | str, width: int, height: int, *, dark: bool = False) -> None:
        """Show a file or an address at a width in CSS pixels, and wait until it is drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait_for("document.readyState == 'complete' && location.href != 'about:blank'")
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        assert self.value(frames) == 1

    def wait_for(self, condition: str) -> None:
        """Poll a condition in JavaScript with a deadline."""
        deadline = time.monotonic() + 60
        while not self.value(condition):
            assert time.monotonic() < deadline, f"it did not come true: {condition}"
            time.sleep(0.05)

    def value(self, script: str) -> Any:
        """Return what JavaScript in the page evaluates to."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def inaccessible(self) -> list[str]:
        """Return what axe-core finds wrong with the page that is open, a line each: contrast, names, keyboard, order.

        The test that asks is skipped where axe-core-python, which holds the script alone, is not installed.
        """
        axe = pytest.importorskip("axe_core_python.base", reason="axe-core-python is not installed (requirements.txt)")
        self.call("Runtime.evaluate", expression=axe.AXE_SCRIPT)
        found = self.value(
            "axe.run().then(found => found.violations.map(one => [one.help, one.nodes.map(n => n.html)]))"
        )
        return [f"{what}: {str(node)[:200]}" for what, nodes in found for node in nodes]

    def screenshot(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.terminate()
        self._process.wait(20)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 20)
            assert data, "the browser is gone"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params") or {})
        return message

    def _note(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(event["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Network.loadingFailed"):
            self.complaints.append(json.dumps(event))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(event["entry"]["text"])
