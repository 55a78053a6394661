"""A real `mlflow server` in a process of its own, that can be killed and started again on its port."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self


class MlflowServer:
    """Keeps what it is sent below `folder`. Starting takes some 10 to 20 seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def database(self) -> str:
        return f"sqlite:///{self.folder / 'server.db'}"

    def start(self) -> None:
        command = ["mlflow", "server", "--backend-store-uri", self.database, "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "artifacts"), "--port", str(self.port)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,  # its workers die with it
            )
        while not self._healthy():
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
