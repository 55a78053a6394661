"""MLflow's pages as a user gets them: from the server that `make ui` starts, in a headless Chromium."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gradeflow.commands.chain import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
START_S = 120.0
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-sync", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """What `make ui` starts in a project's folder, on a free port: its address. It ends with all its processes."""
    port = free_port()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "MLFLOW_"))}
    tools = f"BIN={Path(sys.executable).parent}"
    log = folder / "ui.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            ["make", "--file", ROOT / "Makefile", "--old-file", "setup", tools, "ui"],
            cwd=folder,
            env=kept | {"MLFLOW_PORT": str(port)},
            start_new_session=True,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            _await(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


def _await(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"make ui does not answer:\n{log.read_text()}")


def chromium() -> str | None:
    return next((found for name in CHROMIUM if (found := shutil.which(name))), None)


@contextmanager
def browser(executable: str) -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        try:
            yield started
        finally:
            started.close()
