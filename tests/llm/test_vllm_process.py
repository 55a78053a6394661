"""A server of one's own, here a named stand-in that answers /health: it does not outlive who started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradeflow.errors import SetupError
from gradeflow.llm import vllm_process

STAND_IN = f"""#!{sys.executable}
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
if sys.argv[1] == "broken":
    sys.exit("ValueError: no such model")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
OWNER = """
import os, sys
from pathlib import Path
from gradeflow.llm import vllm_process
program, port, log = sys.argv[1:]
with vllm_process.running([program, port], os.environ, f"http://127.0.0.1:{port}", Path(log)) as process:
    print(process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    made = tmp_path / "vllm"
    made.write_text(STAND_IN)
    made.chmod(0o755)
    return made


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def runs(pid: int) -> bool:
    try:
        return "\tZ" not in Path(f"/proc/{pid}/status").read_text().partition("State:")[2].partition("\n")[0]
    except FileNotFoundError:
        return False


def test_it_is_stopped_at_the_end(program: Path, tmp_path: Path) -> None:
    port = free_port()
    command, log = [str(program), str(port)], tmp_path / "logs" / "vllm.log"
    with vllm_process.running(command, os.environ, f"http://127.0.0.1:{port}", log) as process:
        assert process.poll() is None
    assert process.poll() is not None


def test_it_ends_with_an_owner_that_is_killed(program: Path, tmp_path: Path) -> None:
    asked = [sys.executable, "-c", OWNER, str(program), str(free_port()), str(tmp_path / "vllm.log")]
    with subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert runs(pid)
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not runs(pid)


def test_one_that_does_not_start_is_quoted(program: Path, tmp_path: Path) -> None:
    broken = vllm_process.running([str(program), "broken"], os.environ, "http://127.0.0.1:9", tmp_path / "vllm.log")
    with pytest.raises(SetupError, match="vLLM ended with status 1: ValueError: no such model"), broken:
        raise AssertionError


def test_the_key_is_in_no_command_line_and_our_environment_not_in_vllms() -> None:
    given = vllm_process.environment("s3cret", {"PATH": "/bin", "VIRTUAL_ENV": "/x", "VLLM_CPU_KVCACHE_SPACE": "4"})
    assert given == {"PATH": "/bin", "VLLM_API_KEY": "s3cret", "VLLM_CPU_KVCACHE_SPACE": "4"}
