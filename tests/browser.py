"""A headless Chromium, driven over the DevTools protocol through pipes; `scripts/browser.sh` installs it.

    with Browser(tmp_path) as browser:
        browser.open(path)
        browser.value("document.title")

Every request that a page makes is in `requests`, and every error and message of its scripts in `told`.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
#: without these it looks for updates of itself, and it needs rights for its sandbox that root does not have
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    *("--force-color-profile=srgb", "--disable-dev-shm-usage"),
)


def program() -> Path:
    """The browser: `HYBRIDRL_BROWSER`, that of `scripts/browser.sh`, or one on the PATH."""
    own = Path(sys.prefix) / "browser" / "chromium"
    installed = next((found for name in _NAMES if (found := shutil.which(name))), None)
    for path in (os.environ.get("HYBRIDRL_BROWSER"), own if own.is_file() else None, installed):
        if path:
            return Path(path)
    raise AssertionError("there is no Chromium: run bash scripts/browser.sh")


class Browser:
    """One tab.

    Args:
        folder: for its profile.
        size: of the window.
    """

    def __init__(self, folder: Path, size: tuple[int, int] = (1280, 900)) -> None:
        self._folder, self._size = folder, size
        self.requests: list[str] = []
        self.told: list[str] = []

    def __enter__(self) -> "Browser":
        path = program()
        read_here, self._write = os.pipe()
        self._read, write_here = os.pipe()
        # the protocol's descriptors are 3 and 4, whatever numbers the pipes have
        script = f'exec "$@" 3<&{read_here} 4>&{write_here}'
        libraries = ":".join(filter(None, (str(path.parent / "lib"), os.environ.get("LD_LIBRARY_PATH"))))
        fonts = path.parent / "fonts"
        home = self._folder / "home"
        (home / ".fonts").parent.mkdir(parents=True, exist_ok=True)
        if fonts.is_dir():
            (home / ".fonts").symlink_to(fonts)
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                "browser",
                path,
                *_FLAGS,
                f"--user-data-dir={self._folder / 'profile'}",
                "about:blank",
            ],
            pass_fds=(read_here, write_here),
            env={**os.environ, "LD_LIBRARY_PATH": libraries, "HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_here)
        os.close(write_here)
        self._rest, self._number, self._session = b"", 0, None
        page = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        width, height = self._size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)  # it ends with the pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._read, 1 << 20)
            assert more, f"the browser ended with {self._process.wait(10)}"
            self._rest += more
        found, _, self._rest = self._rest.partition(b"\0")
        return json.loads(found)

    def _note(self, event: str | None, facts: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.told.append(json.dumps(facts["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.told.append(json.dumps(facts["args"]))
        elif event == "Log.entryAdded":
            self.told.append(facts["entry"]["text"])
        elif event == "Page.javascriptDialogOpening":
            self.told.append(f"dialog: {facts['message']}")

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file anew, forget what others asked and told, and wait until it says `data-ready` at its root."""
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank' && document.readyState === 'complete'")
        self.requests.clear()
        self.told.clear()
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        self.until("document.documentElement?.dataset.ready === '1'")

    def value(self, script: str) -> Any:
        """The value of an expression on the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < end, f"never true: {script}; {self.told}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a key: a character, or a name such as ArrowDown."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        """Enter text where the focus is."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        x, y = self.value(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'center'}); const area = node.getBoundingClientRect();"
            " return [area.x + area.width / 2, area.y + area.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def dark(self, on: bool) -> None:
        """Prefer dark colours."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
