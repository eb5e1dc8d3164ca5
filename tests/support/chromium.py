"""A headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import select
import shutil
import time
from types import TracebackType
from typing import Any, Self

from . import procs
from .wait import eventually

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_SANDBOX = () if os.geteuid() else ("--no-sandbox",)


class Chromium:
    """`with Chromium(folder) as browser: browser.open(url)`. One page."""

    def __init__(self, profile: pathlib.Path) -> None:
        assert BINARY, "no Chromium"
        self._procs = procs.Procs()
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # Chromium reads at descriptor 3 and writes to 4.
        line = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        argv = [BINARY, "--headless", *_SANDBOX, "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        with (profile.parent / "chromium.log").open("ab") as log:
            self._procs.popen(
                ["bash", "-c", line, "bash", *argv], stdout=log, stderr=log, pass_fds=(theirs_in, theirs_out)
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._write = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self.errors: list[str] = []
        """What the page's console says: errors of scripts, breaches of the policy."""
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        sent = {"id": self._number, "method": method, "params": params}
        if self._session:
            sent["sessionId"] = self._session
        os.write(self._write, json.dumps(sent).encode() + b"\0")
        end_s = time.monotonic() + 60
        while True:
            got = self._next(end_s)
            if got.get("id") == self._number:
                assert "error" not in got, got
                return dict(got["result"])
            if got.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(got["params"]))

    def _next(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, "Chromium does not answer"
            raw = os.read(self._read, 1 << 20)
            assert raw, "Chromium has ended"
            self._buffer += raw
        first, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(first))

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the page, and which colours its user prefers."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=phone,
                  deviceScaleFactor=2 if phone else 1)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        eventually(lambda: self.value("location.href") == url and self.value("document.readyState") == "complete", 60)

    def value(self, expression: str) -> Any:
        """Of JavaScript in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, file: pathlib.Path) -> None:
        """The whole page as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        self._procs.close()
