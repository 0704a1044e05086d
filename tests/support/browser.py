"""A headless Chromium, driven over a pair of pipes with its DevTools protocol.

Messages are JSON, each ended by a zero byte. A tab notes what its console and its exceptions say,
also before any script of the page ran.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium is installed here, and the page is read in a real one"
)
WAIT_SECONDS = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
PLACE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A browser reads descriptor 3 and writes descriptor 4."""


class Browser:
    """One process; tabs are opened in it."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, of: int) -> None:
        self._process, self._to, self._of = process, to, of
        self._rest, self._number = b"", 0
        self._tabs: dict[str, Tab] = {}

    @contextmanager
    def tab(self, url: str, *, width: int = 1300, height: int = 900) -> Iterator[Tab]:
        """A page in a tab of its own, ready."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        try:
            for domain in ("Runtime", "Log", "Page"):
                tab.call(f"{domain}.enable")
            tab.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=False,
            )
            tab.call("Page.navigate", url=url)
            tab.wait("document.body && document.body.dataset.ready")
            yield tab
        finally:
            del self._tabs[session]
            self.call("Target.closeTarget", targetId=target)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            asked["sessionId"] = session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            found = self._read(deadline)
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                result: dict[str, Any] = found["result"]
                return result
            if (tab := self._tabs.get(found.get("sessionId", ""))) is not None:
                tab.note(found["method"], found.get("params", {}))

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            seconds = max(deadline - time.monotonic(), 0)
            assert select.select([self._of], [], [], seconds)[0], "the browser says nothing"
            piece = os.read(self._of, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self._noted: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method of the protocol, for this page."""
        return self._browser.call(method, self._session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        """What it tells unasked."""
        if method == "Runtime.exceptionThrown":
            self._noted.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self._noted.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self._noted.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def evaluate(self, script: str) -> Any:
        """The value of an expression, as JSON holds it; waits for a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = WAIT_SECONDS) -> Any:
        """The first value of an expression that is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.evaluate(script)):
            assert time.monotonic() < deadline, (script, self._noted, self.text("body")[:500])
            time.sleep(0.02)
        return found

    def errors(self) -> list[str]:
        """Of its console, and those that the page found itself; the next call tells new ones."""
        own = self.evaluate("document.body.dataset.errors || ''")
        noted, self._noted = self._noted, []
        return [*noted, *([own] if own else [])]

    def text(self, selector: str) -> str:
        """What is read at the first element of a selector."""
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def rows(self, table: str) -> list[list[str]]:
        """Cells of the body of a table, by its id."""
        script = (
            f"[...document.querySelectorAll('#{table} tbody tr')]"
            ".map((row) => [...row.cells].map((cell) => cell.innerText))"
        )
        found: list[list[str]] = self.evaluate(script)
        return found

    def press(self, key: str) -> None:
        """A key that is no letter, such as `Tab` or `ArrowRight`, as a person presses it."""
        code = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38}
        code |= {"ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code[key],
                **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
            )

    def type(self, text: str) -> None:
        """Text where the focus is."""
        self.call("Input.insertText", text=text)


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own.

    Args:
        folder: for the profile.
    """
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Those numbers may be taken here by other things; they are put in place behind the fork.
    reads = fcntl.fcntl(theirs_in, fcntl.F_DUPFD, 20)
    writes = fcntl.fcntl(theirs_out, fcntl.F_DUPFD, 20)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", PLACE, str(reads), str(writes)),
            *(CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"),
        ],
        pass_fds=(reads, writes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (theirs_in, theirs_out, reads, writes):
        os.close(end)
    browser = Browser(process, ours_out, ours_in)
    try:
        yield browser
        browser.call("Browser.close")
    finally:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours_out)
        os.close(ours_in)
