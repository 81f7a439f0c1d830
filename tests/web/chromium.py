"""A real headless Chromium, driven over the DevTools protocol, with a profile of its own, gone at the end.

Nothing outside loopback can be asked: names resolve to nothing but 127.0.0.1, and every request is recorded.
"""

from __future__ import annotations

import base64
import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from deadlines import Deadline, within_s
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

START_S = 60.0
ANSWER_S = 30.0
WAIT_S = 20.0
END_S = 10.0
MOST_BYTES = 64 << 20
"""Of one message: a screenshot of a long page."""
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-breakpad",
    "--metrics-recording-only",
    "--mute-audio",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--force-color-profile=srgb",
)
PR_SET_PDEATHSIG = 1


def program() -> str | None:
    """Where Chromium is; None: nowhere."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _dies_with_us() -> None:
    """Of the process that we become: a test run that is killed takes it along."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Chromium:
    """The browser. `with Chromium() as browser: page = browser.page()`."""

    def __init__(self) -> None:
        # Of its profile and everything else that it writes. There are sockets in it, so its name is short.
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", dir="/tmp", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._profile = folder / "profile"
        self._home = folder / "home"
        self._home.mkdir(parents=True)
        path = program()
        assert path is not None
        environment = {**os.environ, "HOME": str(self._home), "TMPDIR": str(self._home)}
        for name in ("CONFIG", "CACHE", "DATA"):
            environment[f"XDG_{name}_HOME"] = str(self._home)
        environment.pop("DBUS_SESSION_BUS_ADDRESS", None)
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                [path, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
                preexec_fn=_dies_with_us,
            )
        self._pages: list[Page] = []
        self._base = ""

    def __enter__(self) -> Chromium:
        try:
            self._base = f"http://127.0.0.1:{self._port()}"
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _port(self) -> int:
        told = self._profile / "DevToolsActivePort"
        deadline = Deadline(START_S)
        while not (told.exists() and (lines := told.read_text().splitlines())):
            assert self._process.poll() is None, f"Chromium ended with {self._process.returncode}"
            assert not deadline.over(), "Chromium does not start"
            time.sleep(0.02)
        return int(lines[0])

    def page(self, **how: Any) -> Page:
        """A new, empty page; `how` as in `Page.__init__`."""
        request = urllib.request.Request(f"{self._base}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=within_s(ANSWER_S)) as answer:
            target = json.load(answer)
        page = Page(target["webSocketDebuggerUrl"], **how)
        self._pages.append(page)
        return page

    def close(self) -> None:
        """End it with all its processes, whatever state it is in."""
        for page in self._pages:
            with suppress(Exception):
                page.close()
        family = [self._process.pid]
        with suppress(psutil.Error):
            family += [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]
        members = [psutil.Process(pid) for pid in family if psutil.pid_exists(pid)]
        for member in members:
            with suppress(psutil.Error):
                member.kill()
        self._process.wait(within_s(END_S))
        _, left = psutil.wait_procs([m for m in members if m.pid != self._process.pid], within_s(END_S))
        self._folder.cleanup()
        assert not left, f"Chromium left {left}"


class Page:
    """One tab: what it is told to do, and everything that it says, asks for and complains of."""

    def __init__(
        self, url: str, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True
    ):
        self._socket = connect(
            url, max_size=MOST_BYTES, open_timeout=within_s(ANSWER_S), compression=None, ping_interval=None
        )
        self._ids = itertools.count(1)
        self.said: list[str] = []
        """Errors and warnings: of the console, of scripts, of the content security policy, of loading."""
        self.asked: list[str] = []
        """Every address that was requested."""
        self._events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "Accessibility"):
            self.tell(f"{domain}.enable")
        self.size(width, height)
        self.prefers(dark=dark)
        if not scripts:
            self.tell("Emulation.setScriptExecutionDisabled", value=True)

    # --- what it is told ------------------------------------------------------------------------------

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        deadline = Deadline(ANSWER_S)
        while True:
            message = self._take(deadline.left_s())
            assert message is not None, f"no answer to {method}"
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """As large as that from now on."""
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def prefers(self, dark: bool = False, calm: bool = False) -> None:
        """What the person set in the system: dark, and reduced motion."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"},
        ]
        self.tell("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Go there and wait until it is loaded."""
        self._events.clear()
        result = self.tell("Page.navigate", url=url)
        assert not result.get("errorText"), f"{url}: {result['errorText']}"
        deadline = Deadline(WAIT_S)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            assert self._take(deadline.left_s()) is not None, f"{url} is not loaded"

    def js(self, expression: str) -> Any:
        """Value of an expression in the page (a promise is waited for)."""
        result = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """What a person reads there; empty: nothing is there."""
        return str(self.js(f"(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ''"))

    def until(self, expression: str, what: str = "", timeout_s: float = WAIT_S) -> None:
        """Wait until an expression in the page is true."""
        deadline = Deadline(timeout_s)
        while not self.js(f"!!({expression})"):
            assert not deadline.over(), f"waiting for {what or expression}: {self.said}"
            time.sleep(0.03)

    def key(self, name: str, code: int, shift: bool = False) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.tell(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
                **({"text": "\r"} if name == "Enter" and kind == "keyDown" else {}),
            )

    def picture(self, path: Path, whole: bool = True) -> None:
        """A PNG of the page."""
        taken = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def accessible(self) -> list[dict[str, Any]]:
        """What a screen reader is told: nodes of the accessibility tree that are not ignored."""
        nodes = self.tell("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node.get("ignored")]

    def settle(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Take in what it says until that holds."""
        deadline = Deadline(timeout_s)
        while not condition():
            assert not deadline.over(), f"waiting for {what}: {self.said}"
            self._take(0.05)

    def close(self) -> None:
        """The tab is gone."""
        with suppress(ConnectionClosed, OSError, AssertionError):
            self.tell("Page.close")
        self._socket.close()

    # --- what it says ---------------------------------------------------------------------------------

    def _take(self, timeout_s: float) -> dict[str, Any] | None:
        """Its next message, which is noted; None: there is none in time."""
        try:
            message: dict[str, Any] = json.loads(self._socket.recv(timeout=max(0.0, timeout_s)))
        except TimeoutError:
            return None
        if "method" in message:
            self._note(message)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        method, about = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.said.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.said.append("console: " + " ".join(str(a.get("value", a)) for a in about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.said.append(f"{about['entry']['source']}: {about['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])
