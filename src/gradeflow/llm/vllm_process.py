"""A vLLM server of one's own: started, waited for, and stopped with the processes that it has started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gradeflow.errors import SetupError

START_S = 900.0
STOP_S = 30.0
BOUND = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""Starts a program that gets SIGTERM when the thread that started it ends, be it by SIGKILL: PR_SET_PDEATHSIG."""


def environment(key: str, given: Mapping[str, str]) -> dict[str, str]:
    """The key goes through the environment: a command line can be read by every user of the machine."""
    own = {"VLLM_API_KEY": key} if key else {}
    kept = {name: value for name, value in given.items() if name not in {"VLLM_API_KEY", "VIRTUAL_ENV", "PYTHONPATH"}}
    return {"VLLM_CPU_KVCACHE_SPACE": "1", **kept, **own}


@contextlib.contextmanager
def running(
    command: Sequence[str], given: Mapping[str, str], url: str, log: Path
) -> "Iterator[subprocess.Popen[bytes]]":
    """The server, answering at `url` (without /v1), with what it says in `log`; it ends with this thread at the latest.

    Raises:
        SetupError: it ends, or does not answer.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", BOUND, *command],
            env=dict(given),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _await(process, url, log)
            yield process
        finally:
            _stop(process)


def _await(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise SetupError(f"vLLM ended with status {process.returncode}: {last[0][:300]} (all of it: {log})")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", trust_env=False, timeout=5).is_success:
                return
        time.sleep(0.2)
    raise SetupError(f"vLLM does not answer at {url} after {START_S:.0f} s; what it said: {log}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the server and the processes it has started: they are one session, ours."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
