"""JupyterLab on loopback and a real browser in front of it, for the tests of the explorers.

The server has directories, a port and a token of its own, so it neither sees nor changes anybody's JupyterLab; whatever it starts ends
with it.
"""

import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from playwright.sync_api import Browser, Locator, Page, sync_playwright

START_S, RUN_S, REACT_S = 60, 300, 30  # how long to wait at most: ten times what it takes on an idle machine
BROWSER_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update", "--disable-sync")
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "defer"},  # "full" takes cells that are out of sight out of the page
}


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def wait_until(condition: Callable[[], Any], limit_s: float, words: str) -> Any:
    """The first true answer of `condition`. Raises TimeoutError."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if answer := condition():
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"{words}: not within {limit_s} s")


class LabServer:
    """A running JupyterLab that serves the notebooks of one folder."""

    def __init__(self, root: Path, home: Path):
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home / "jupyter.log"
        self.settings = home / "settings" / "@jupyterlab"
        for name, values in SETTINGS.items():
            self.set(name, values)
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": self.port,
            "ServerApp.port_retries": 0,
            "IdentityProvider.token": self.token,
            "ServerApp.root_dir": root,
            "ServerApp.shutdown_no_activity_timeout": 900,  # should even the clean-up be killed
            "LabApp.extension_manager": "readonly",
        }
        command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", *(f"--{k}={v}" for k, v in options.items())]
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, env=_environment(home), stdout=log, stderr=subprocess.STDOUT)

    def set(self, name: str, values: dict[str, Any]) -> None:
        """Change settings of the pages that are opened from now on."""
        path = self.settings / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")

    def wait(self) -> None:
        wait_until(self._is_up, START_S, "JupyterLab starts")

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {self.process.returncode}: {self.log.read_text(encoding='utf-8')[-2000:]}")
        try:
            return bool(self.get("/api/status"))
        except OSError:
            return False

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def is_idle(self, notebook: str) -> bool:
        """Whether the notebook's kernel waits for work, with the page connected to it. The page's own idle sign comes too early."""
        kernels = [session["kernel"] for session in self.get("/api/sessions") if session["path"] == notebook]
        return any(kernel["execution_state"] == "idle" and kernel["connections"] >= 1 for kernel in kernels)

    def stop(self) -> None:
        """End the server and, by their ids, all processes that it started."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.terminate()
        _, left = psutil.wait_procs([*children, psutil.Process(self.process.pid)] if self.process.poll() is None else children, timeout=10)
        for process in left:
            process.kill()
        self.process.wait(10)


def _environment(home: Path) -> dict[str, str]:
    places = {name: str(home / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    places["JUPYTERLAB_SETTINGS_DIR"] = str(home / "settings")
    places["JUPYTERLAB_WORKSPACES_DIR"] = str(home / "workspaces")
    return {**os.environ, **places, "JUPYTER_PREFER_ENV_PATH": "1"}


@contextmanager
def lab_server(root: Path, home: Path) -> Iterator[LabServer]:
    """JupyterLab over the notebooks in `root`; it keeps its own files in `home`."""
    home.mkdir(parents=True, exist_ok=True)
    server = LabServer(root, home)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, headless=True, args=list(BROWSER_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class OpenNotebook:
    """A notebook in the browser: run it, move its sliders, look at its pictures. Notes what the page complains of and whom it asks."""

    def __init__(self, page: Page, server: LabServer, notebook: str):
        self.page, self.server, self.notebook = page, server, notebook
        self.complaints: list[str] = []
        self.outside_requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._note_request(request.url))
        # A workspace of its own: a second page of the same one would be sent elsewhere while it loads.
        workspace = notebook.removesuffix(".ipynb")
        page.goto(f"{server.url}/lab/workspaces/{workspace}/tree/{notebook}?token={server.token}", wait_until="commit")
        page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=1000 * START_S)
        wait_until(lambda: self.is_idle, START_S, f"the kernel of {notebook} starts")

    def _note_request(self, url: str) -> None:
        place = urlsplit(url)
        if place.scheme not in ("data", "blob") and place.netloc != f"127.0.0.1:{self.server.port}":
            self.outside_requests.append(url)

    def run_all(self) -> None:
        """Run All Cells. Doesn't wait for them."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_text("Run All Cells", exact=True).click()

    def wait_for_end(self) -> None:
        """Until all cells have run: a kernel answers sliders after its cells only. Raises RuntimeError if one of them failed."""
        wait_until(self._has_run, RUN_S, f"{self.notebook} runs through")
        if errors := self._errors():
            raise RuntimeError(f"a cell of {self.notebook} failed:\n{errors[0]}")

    def _has_run(self) -> bool:
        # Numbers of cells prove nothing, since some are stored in the file; a live slider is never stored.
        is_under_way = self.page.locator(".jp-OutputArea-output .widget-slider").count() > 0
        prompts = self.page.locator(".jp-CodeCell .jp-InputPrompt").all_text_contents()
        is_done = is_under_way and self.is_idle and not any("*" in prompt for prompt in prompts)
        return is_done or bool(self._errors())

    @property
    def is_idle(self) -> bool:
        return self.server.is_idle(self.notebook)

    def _errors(self) -> list[str]:
        return self.page.locator('.jp-OutputArea-output [data-mime-type="application/vnd.jupyter.error"]').all_text_contents()

    def explorer(self, slider: str) -> "OpenExplorer":
        """The explorer that has a slider of this description."""
        area = self.page.locator(".jp-OutputArea-output").filter(has=self.page.locator(".widget-slider .widget-label", has_text=slider))
        return OpenExplorer(self, area.first, slider)


class OpenExplorer:
    """One explorer on the page, and the slider to move."""

    def __init__(self, notebook: OpenNotebook, area: Locator, slider: str):
        self.notebook, self.page, self.area = notebook, notebook.page, area
        self.slider = area.locator(".widget-slider").filter(has=self.page.locator(".widget-label", has_text=slider)).first
        self.slider.scroll_into_view_if_needed()

    @property
    def caption(self) -> str:
        return self.area.locator(".widget-html-content div").first.inner_text()

    def picture(self) -> str:
        """A hash of the picture that is shown. It is read off the screen: its address may change while one looks."""
        data = self.area.locator("img.widget-image").evaluate(
            """image => {
                const canvas = document.createElement("canvas");
                [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
                canvas.getContext("2d").drawImage(image, 0, 0);
                return canvas.toDataURL();
            }"""
        )
        return hashlib.sha256(data.encode()).hexdigest()

    def drag(self, share: float) -> tuple[str, str]:
        """Take the handle with the mouse and move it to this share of the slider's way. Returns the sentence and the picture then."""
        handle, track = self.slider.locator(".noUi-handle").bounding_box(), self.slider.locator(".noUi-target").bounding_box()
        assert handle and track, "the slider has no size"
        start_x, end_x = handle["x"] + handle["width"] / 2, track["x"] + share * track["width"]
        y = handle["y"] + handle["height"] / 2

        def move() -> None:
            self.page.mouse.move(start_x, y)
            self.page.mouse.down()
            self.page.mouse.move(end_x, y, steps=10)
            self.page.mouse.up()

        return self._after(move)

    def press(self, key: str) -> tuple[str, str]:
        """Press a key on the slider's handle."""
        return self._after(lambda: self.slider.locator(".noUi-handle").press(key))

    def choose(self, description: str, option: str) -> tuple[str, str]:
        chooser = self.area.locator(".widget-dropdown").filter(has_text=description).locator("select")
        return self._after(lambda: chooser.select_option(option))

    def click(self, title: str, times: int = 1) -> tuple[str, str]:
        """Click a button, several times without waiting in between."""
        button = self.area.locator(f'button[title="{title}"]')
        return self._after(lambda: [button.click() for _ in range(times)])

    def play_until(self, is_enough: Callable[[], bool]) -> None:
        """Press play, wait, and press it again; then until all is still."""
        button = self.area.locator(".widget-play button").first
        button.click()
        wait_until(is_enough, REACT_S, "the player has come far enough")
        button.click()
        wait_until(self._is_still, REACT_S, "sentence and picture come to rest")

    def _after(self, act: Callable[[], Any]) -> tuple[str, str]:
        """The sentence and the picture after something was done: both must become others, and then stay so."""
        caption, picture = self.caption, self.picture()
        act()
        wait_until(lambda: self.caption != caption and self.picture() != picture, REACT_S, "sentence and picture follow")
        wait_until(self._is_still, REACT_S, "sentence and picture come to rest")
        return self.caption, self.picture()

    def wait_for_words(self, words: str) -> None:
        wait_until(lambda: words in self.caption, REACT_S, f"the sentence says {words!r}")

    def _is_still(self) -> bool:
        """Nothing changes for a second and the kernel has nothing to do: a hand that moved far is answered several times."""
        caption, picture = self.caption, self.picture()
        time.sleep(1.0)
        return self.notebook.is_idle and (caption, picture) == (self.caption, self.picture())

    def save_screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.area.screenshot(path=path)
