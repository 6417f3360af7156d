"""A real JupyterLab or Notebook 7 on loopback with directories of its own, and one notebook at a time in a headless browser."""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
from mock_host import ROUNDED, violations

SETTINGS = {  # no news, no update prompts; every cell stays in the page
    "@jupyterlab/apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false", "doNotDisturbMode": True},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}

ERRORS = ", ".join(f'[data-mime-type="application/vnd.jupyter.{kind}"]' for kind in ("error", "stderr"))
"""Up to JupyterLab 4.5 an error has a type of its own, from 4.6 on that of a stream to stderr: its words tell it from one."""
RAISED = re.compile(r"Traceback \(most recent call last\)|^\w*(Error|Exception|Interrupt|Exit): ", re.MULTILINE)


KERNEL = "exl2nb-under-test"


class Lab:
    """The server. `root` is its notebook folder, `home` everything else it writes; `python` has the application to run.

    app: "lab" or "notebook". The kernel is this Python's, whatever serves the page.
    """

    def __init__(self, home: Path, *, theme: str = "JupyterLab Light", python: str = sys.executable, app: str = "lab") -> None:
        self.home, self.root, self.app = home, home / "notebooks", app
        self.root.mkdir()
        settings = {**SETTINGS, "@jupyterlab/apputils-extension/themes": {"theme": theme}}
        for name, values in settings.items():
            file = home / "settings" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        self.port, self.token = _free_port(), secrets.token_hex(8)
        folders = {"CONFIG": "config", "DATA": "data", "RUNTIME": "runtime"}
        env = {**os.environ, **{f"JUPYTER_{key}_DIR": str(home / value) for key, value in folders.items()}}
        env |= {"IPYTHONDIR": str(home / "ipython"), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings")}
        env |= {"JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "OMP_NUM_THREADS": "1", "JUPYTER_PLATFORM_DIRS": "1"}
        options = ["--no-browser", "--ip=127.0.0.1", f"--port={self.port}", "--ServerApp.port_retries=0", "--allow-root"]
        options += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.root}", "--LabApp.news_url="]
        self.log = home / "server.log"
        with self.log.open("w") as log:
            if app == "notebook":  # its own `python3` would have no exl2nb
                env.pop("JUPYTER_PATH", None)  # extensions of another environment
                kernel = home / "data" / "kernels" / KERNEL
                kernel.mkdir(parents=True)
                argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
                (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": KERNEL, "language": "python"}))
                command = [python, "-m", "notebook", *options]
            else:
                command = [python, "-m", "jupyter", "lab", *options]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/status?token={self.token}", timeout=1)
                return
            time.sleep(0.1)
        raise RuntimeError(f"JupyterLab did not start:\n{self.log.read_text()[-2000:]}")

    def set_theme(self, theme: str) -> None:
        (self.home / "settings/@jupyterlab/apputils-extension/themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


class Notebook:
    """One notebook made of `cells`, open and idle in `page`."""

    def __init__(self, lab: Lab, page, cells: list[str], *, name: str = "") -> None:
        self.page, self.name = page, name or f"test_{secrets.token_hex(4)}.ipynb"
        kernel = KERNEL if lab.app == "notebook" else "python3"
        spec = {"name": kernel, "display_name": kernel, "language": "python"}
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata={"kernelspec": spec})
        self.path = lab.root / self.name
        nbformat.write(book, self.path)
        where = f"notebooks/{self.name}?" if lab.app == "notebook" else f"lab/tree/{self.name}?reset&"
        page.goto(f"http://127.0.0.1:{lab.port}/{where}token={lab.token}")
        page.locator(".jp-Notebook .jp-Cell").nth(len(cells) - 1).wait_for(timeout=60_000)
        # In the Lab the execution indicator says idle before the kernel is there; the status bar does not.
        if lab.app == "notebook":
            self.idle = page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")
        else:
            self.idle = page.locator("#jp-bottom-panel", has_text=re.compile(r"\| Idle"))
        self.idle.wait_for(timeout=60_000)
        page.wait_for_function("() => !document.querySelector('.jp-MainAreaWidget > .jp-Spinner')", timeout=60_000)

    def cell(self, index: int):
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def start(self, index: int) -> None:
        """Run a cell without waiting for it."""
        self.cell(index).locator(".jp-InputPrompt").click()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+Enter")

    def run(self, index: int, *, timeout_s: float = 60) -> str:
        """Run a cell to its end and return the text of its outputs.

        Raises:
            AssertionError: the cell raised; the message is its traceback.
        """
        prompt = self.cell(index).locator(".jp-InputPrompt")
        # A cell keeps its old number until it starts, and a new kernel counts from 1 again.
        prompt.evaluate("node => { node.textContent = '[ ]:' }")
        self.start(index)
        prompt.filter(has_text=re.compile(r"\[\d+\]")).wait_for(timeout=timeout_s * 1000)
        raised = [text for text in self.cell(index).locator(ERRORS).all_inner_texts() if RAISED.search(text)]
        assert not raised, raised[0]
        return self.output(index)

    def output(self, index: int) -> str:
        return "\n".join(self.cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def is_busy(self, index: int) -> bool:
        return "[*]" in self.cell(index).locator(".jp-InputPrompt").inner_text()

    def wait_idle(self, *, timeout_s: float = 30) -> None:
        self.idle.wait_for(timeout=timeout_s * 1000)

    def save(self):
        """Save from the page and read the file back."""
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        end = time.monotonic() + 30
        while True:
            time.sleep(0.1)
            if self.path.stat().st_mtime_ns != before:
                try:
                    return nbformat.read(self.path, as_version=4)
                except nbformat.reader.NotJSONError:  # being written
                    pass
            assert time.monotonic() < end, "the notebook was not saved"


class Cells(Notebook):
    """A notebook whose cells have names; those in `first` have run."""

    def __init__(self, lab: Lab, page, cells: dict[str, str], first: tuple[str, ...] = ("start",)) -> None:
        super().__init__(lab, page, list(cells.values()))
        self.place = {name: i for i, name in enumerate(cells)}
        for name in first:
            self.run_named(name)

    def run_named(self, name: str) -> str:
        """Run a cell to its end; its output."""
        return self.run(self.place[name])

    def shown(self, kind: str):
        """Run the cell of a widget; the widget on the page."""
        self.run_named(kind)
        widget = self.page.locator(f".exl2nb-{kind}")
        widget.wait_for()
        return widget

    def look(self, kind: str, screenshots: Path, prefix: str = "lab") -> None:
        """Keep a picture, and ask axe."""
        found = violations(self.page, f".exl2nb-{kind}", besides=ROUNDED)
        assert not found, found
        self.page.locator(f".exl2nb-{kind}").screenshot(path=screenshots / f"{prefix}-{kind}.png")

    def stored(self, name: str) -> str:
        """The HTML that the saved notebook has for a cell, without a kernel."""
        outputs = self.save().cells[self.place[name]].outputs
        return "".join(str(output.get("data", {}).get("text/html", "")) for output in outputs)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
