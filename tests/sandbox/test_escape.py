"""Ways out of the sandbox: each works without isolation, and within it is blocked and reported as what it was."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gradeflow.sandbox import Execution, RefusedOutputError, Sandbox, read_output, seccomp
from support.sandboxes import both, execute, in_sandbox

with_and_without = pytest.mark.parametrize("isolation", ["auto", "none"])
root = os.geteuid() == 0


@pytest.fixture
def host(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What there is to reach, as the code's inputs: servers, files, a process."""
    (tmp_path / "answers.csv").write_text("42")
    abstract = f"\0gradeflow-test-{os.getpid()}"
    with (
        socket.create_server(("0.0.0.0", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as unnamed,
        tempfile.NamedTemporaryFile(dir=Path.home(), prefix=".gradeflow-test-") as at_home,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim,
    ):
        for listener, address in ((named, str(tmp_path / "socket")), (unnamed, abstract)):
            listener.bind(address)
            listener.listen()
        yield {
            "local": ["127.0.0.1", server.getsockname()[1]],
            "outside": [own_address(), server.getsockname()[1]],
            "socket": str(tmp_path / "socket"),
            "abstract": abstract,
            "answers": str(tmp_path / "answers.csv"),
            "home": at_home.name,
            "project": str(Path(__file__).resolve()),
            "pid": victim.pid,
            "new": str(tmp_path / "new"),
        }
        victim.kill()


def own_address() -> str:
    """This machine's address in its network, which is as far outside as a test goes; its loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


AMPLE = {"wall_s": 20.0, "cpu_s": 20, "memory_mb": 2048, "processes": 64, "disk_mb": 64, "output_kb": 64}


class Way(NamedTuple):
    """Code that ends without an error only when it is out; `error` is its end in isolation, as a type or a limit."""

    code: str
    error: str
    message: str = ""
    control: bool = True  # whether this user can do it unsandboxed


CONNECT = "import socket\nfrom harness import inputs\ns = socket.socket(socket.{})\ns.settimeout(5)\ns.connect({})"
READ = "from harness import inputs\nopen({}, 'rb').read()"
LIBC = (
    "import ctypes, os\nfrom harness import inputs\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "def call(number, *arguments):\n    found = libc.syscall(number, *arguments)\n"
    "    if found == -1:\n        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
    "    return found\n"
)
UNLINKED = (
    "import os\nheld = []\nfor _ in range(9):\n    held.append(open('{0}', 'wb'))\n    os.unlink('{0}')\n"
    "    held[-1].write(bytes(1 << 20))"
)
PTRACE = {"x86_64": 101, "aarch64": 117}[os.uname().machine]
CALLS = seccomp.REFUSED[os.uname().machine]
WAYS = {
    "loopback": Way(CONNECT.format("AF_INET", "tuple(inputs['local'])"), "ConnectionRefusedError"),
    "outside": Way(CONNECT.format("AF_INET", "tuple(inputs['outside'])"), "OSError", "Network is unreachable"),
    "hypervisor": Way(
        "import socket\nsocket.socket(socket.AF_VSOCK)",
        "OSError",
        "Address family not supported",
        Path("/dev/vsock").exists(),
    ),
    "unix socket": Way(CONNECT.format("AF_UNIX", "inputs['socket']"), "FileNotFoundError"),
    "abstract socket": Way(CONNECT.format("AF_UNIX", "inputs['abstract']"), "ConnectionRefusedError"),
    "private answers": Way(READ.format("inputs['answers']"), "FileNotFoundError"),
    "home": Way(READ.format("inputs['home']"), "FileNotFoundError"),
    "project": Way(READ.format("inputs['project']"), "FileNotFoundError"),
    "/proc of others": Way(READ.format("f'/proc/{inputs[\"pid\"]}/environ'"), "FileNotFoundError"),
    "their files": Way(READ.format('f\'/proc/{inputs["pid"]}/root{inputs["answers"]}\''), "FileNotFoundError"),
    "kernel log": Way("open('/dev/kmsg')", "FileNotFoundError", control=root and Path("/dev/kmsg").exists()),
    "symbolic link": Way(
        "import os\nfrom harness import inputs\nos.symlink(inputs['answers'], 'link')\nopen('link').read()",
        "FileNotFoundError",
    ),
    "hard link": Way("import os\nfrom harness import inputs\nos.link(inputs['answers'], 'link')", "FileNotFoundError"),
    "writing outside": Way("from harness import inputs\nopen(inputs['new'], 'w')", "FileNotFoundError"),
    "signal": Way("import os\nfrom harness import inputs\nos.kill(inputs['pid'], 15)", "ProcessLookupError"),
    "ptrace": Way(LIBC + f"call({PTRACE}, 16, inputs['pid'], 0, 0)", "ProcessLookupError", control=root),
    "becoming root": Way("import os\nos.setuid(0)", "PermissionError" if root else "OSError", control=root),
    "setuid file": Way(
        "import os\nopen('x', 'w').close()\nos.chmod('x', 0o4755)\nassert os.stat('x').st_mode & 0o4000",
        "PermissionError",
    ),
    "device file": Way(
        "import os, stat\nos.mknod('null', stat.S_IFCHR | 0o666, os.makedev(1, 3))", "PermissionError", control=root
    ),
    "mount": Way(
        "import os, subprocess\nos.mkdir('m')\nsubprocess.run(['mount', '-t', 'tmpfs', 'x', 'm'], check=True)\n"
        "subprocess.run(['umount', 'm'], check=True)",
        "CalledProcessError",
        control=root,
    ),
    "user namespace": Way(
        "import subprocess\nsubprocess.run(['unshare', '--user', 'true'], check=True)", "CalledProcessError"
    ),
    "fork bomb": Way("import os, time\nfor _ in range(40):\n    if not os.fork(): time.sleep(60)", "processes"),
    "memory of memfd": Way("import os\nos.write(os.memfd_create('x'), b'x')", "PermissionError"),
    "memory of System V": Way(LIBC + f"call({CALLS['shmget']}, 0, 1 << 20, 0o1600)", "PermissionError"),
    "keyring": Way(LIBC + f"call({CALLS['keyctl']}, 0, -3, 1)", "PermissionError"),
    "disk": Way("for n in range(9): open(str(n), 'wb').write(bytes(1 << 20))", "disk"),
    "shared memory": Way(UNLINKED.format("/dev/shm/gradeflow-test"), "disk"),
    "unlinked files": Way(UNLINKED.format("x"), "disk"),
}


@both
@pytest.mark.parametrize("way", WAYS)
def test_a_way_out_is_closed(way: str, isolation: str, host: dict[str, Any]) -> None:
    code, error, message, control = WAYS[way]
    if isolation == "none" and not control:
        pytest.skip("not for this user on this machine, sandbox or not")
    settings = AMPLE if isolation == "none" else {}
    code += "\nimport harness\nharness.result('out')"
    found = execute(code, isolation=isolation, settings=settings, inputs=host)
    if isolation == "none":
        assert (found.status, found.value) == ("ok", "out"), found.error
    elif isolation == "landlock":
        assert found.status == "limit" or (found.status, found.value) == ("failed", None)
    else:
        limit = error in {"processes", "disk"}
        assert (found.status, found.limit or found.error_type) == ("limit" if limit else "failed", error), found.error
        assert found.value is None
        assert message in found.error


THREADS = (
    "import threading\nend = threading.Event()\n"
    "for _ in range(24): threading.Thread(target=end.wait, daemon=True).start()"
)
LIMITS = {
    "wall": ("import time\ntime.sleep(0.5)", {"wall_s": 0.2}),
    "cpu": ("import time\nwhile time.process_time() < 1.2: pass", {"cpu_s": 1}),
    "memory": ("x = bytearray(300 << 20)", {}),
    "processes": (THREADS, {"memory_mb": 2048}),
    "disk": ("open('x', 'wb').write(bytes(5 << 20))", {}),
    "files": ("held = [open('/dev/null') for _ in range(300)]", {}),
    "output": ("for _ in range(120): print('x' * 10_000)", {}),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_named_and_is_the_reason(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, tight = LIMITS[limit]
    found = execute(code, settings=tight)
    assert (found.status, found.limit, found.error_type) == ("limit", limit, None)
    monkeypatch.setattr("gradeflow.sandbox.run.OPEN_FILES", 1024)
    assert execute(code, settings=AMPLE).status == "ok"


LEAVES = {
    "a FIFO": ("import os\nos.mkfifo('result')", "not a regular file"),
    "a link": ("import os, harness\nos.symlink(harness.inputs['answers'], 'result')", "symbolic links"),
    "a link above": (
        "import os, harness\nos.symlink(os.path.dirname(harness.inputs['answers']), 'result')",
        "symbolic links",
    ),
    "a folder": ("import os\nos.mkdir('result')", "not a regular file"),
    "a socket": ("import socket\nsocket.socket(socket.AF_UNIX).bind('result')", "No such device"),
    "too much": ("open('result', 'wb').write(bytes(1000))", "larger than 100 bytes"),
}


@pytest.mark.parametrize("what", LEAVES)
def test_a_result_that_is_no_file_is_refused(what: str, host: dict[str, Any], tmp_path: Path) -> None:
    code, reason = LEAVES[what]
    (work := tmp_path / "work").mkdir()
    assert execute(code, folder=work, inputs=host).status == "ok"
    if what == "a link":
        assert (work / "result").read_text() == "42"
    with pytest.raises(RefusedOutputError, match=reason):
        read_output(work, "result", 100)
    assert (
        execute("import shutil, os\nos.rename('result', 'old')\nopen('result', 'w').write('7')", folder=work).status
        == "ok"
    )
    assert read_output(work, "result", 100) == b"7"


@with_and_without
def test_deleting_the_workspace_spoils_no_later_run(isolation: str, tmp_path: Path) -> None:
    (work := tmp_path / "work").mkdir()
    code = "import os, shutil\nshutil.rmtree(os.getcwd())"
    found = execute(code, isolation=isolation, folder=work)
    if isolation == "none":
        assert not work.exists()
    else:
        assert (found.status, found.error_type) == ("failed", "OSError")
        assert execute("open('x', 'w').write('x')", folder=work).status == "ok"
        assert (work / "x").exists()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os\nos.closerange(0, 99)", "Exited"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "Killed"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "wall"),
    ],
)
def test_code_that_breaks_its_own_interpreter_is_to_blame(code: str, error: str) -> None:
    found = execute(code, wall_s=1.0)
    assert (found.status, found.limit or found.error_type) == ("limit" if error == "wall" else "failed", error)


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("began", "w").close()
        time.sleep(1)
        open("lived", "w").close()
    os._exit(0)
while not os.path.exists("began"):
    time.sleep(0.01)
"""


@with_and_without
def test_a_daemon_dies_with_its_run(isolation: str, tmp_path: Path) -> None:
    assert execute(DAEMON, isolation=isolation, folder=tmp_path).status == "ok"
    assert (tmp_path / "began").exists()
    time.sleep(1.5)
    assert (tmp_path / "lived").exists() is (isolation == "none")


@both
def test_no_environment_of_the_host(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADEFLOW_TEST_KEY", "secret")
    code = (
        "import harness, os\nfound = list(os.environ.values())\n"
        "for name in ('self', 1, os.getppid()):\n    try: found.append(open(f'/proc/{name}/environ').read())\n"
        "    except OSError: pass\n"
        "harness.result(['secret' in ' '.join(found), 'GRADEFLOW_TEST_KEY' in os.environ])"
    )
    assert execute(code, isolation=isolation).value[1] is False
    assert execute(code, isolation=isolation).value[0] is (
        isolation == "none" and "GRADEFLOW_TEST_KEY" in host_environ()
    )


def host_environ() -> str:
    """What /proc shows of this process: the environment it was started with, not what was set since."""
    return Path("/proc/self/environ").read_text(errors="replace")


def test_no_privileges_and_no_way_to_get_more() -> None:
    code = (
        "import harness, os, subprocess\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())\n"
        "again = subprocess.run(['/usr/bin/unshare', '--user', 'true'], capture_output=True)\n"
        "system = ('/', '/dev', '/usr/lib', '/usr/bin', '/proc/sys', '/home')\n"
        "harness.result([os.getuid(), int(status['CapEff'], 16), int(status['NoNewPrivs']),\n"
        "    [place for place in system if os.access(place, os.W_OK)], again.returncode != 0])"
    )
    assert execute(code).value == [65534, 0, 1, [], True]


def test_nothing_is_left_for_the_next_run() -> None:
    async def twice(sandbox: Sandbox) -> list[Any]:
        leave = (
            "import builtins, os, subprocess\nbuiltins.left = 1\n"
            "open('left', 'w').write('x')\nopen('/tmp/left', 'w').write('x')\n"
            "subprocess.Popen(['sleep', '60'], start_new_session=True)\nos.environ['LEFT'] = '1'"
        )
        look = (
            "import builtins, harness, os\n"
            "harness.result([hasattr(builtins, 'left'), os.listdir('.'), os.listdir('/tmp'),\n"
            "    'LEFT' in os.environ, sum(n.isdigit() for n in os.listdir('/proc'))])"
        )
        await sandbox.run(leave)
        return [(await sandbox.run(look)).value for _ in range(4)]

    assert in_sandbox(twice) == [[False, [], [], False, 2]] * 4


@with_and_without
def test_a_key_in_the_kernel_does_not_reach_the_next_run(isolation: str) -> None:
    """Keyrings belong to a user, not to a namespace; a run's entry would be in sight of the next."""
    name = f"gradeflow-test-{os.getpid()}"
    leave = (
        LIBC
        + f"key = call({CALLS['add_key']}, b'user', {name.encode()}, b'x', 1, -4)\ncall({CALLS['keyctl']}, 15, key, 5)"
    )
    look = f"import harness\nharness.result({name!r} in open('/proc/keys').read())"

    async def twice(sandbox: Sandbox) -> list[Execution]:
        return [await sandbox.run(leave), await sandbox.run(look)]

    first, second = in_sandbox(twice, isolation)
    assert first.error_type == (None if isolation == "none" else "PermissionError")
    assert second.value is (isolation == "none")


@with_and_without
def test_files_without_a_name_count_for_the_disk_of_a_working_folder(isolation: str, tmp_path: Path) -> None:
    settings = AMPLE if isolation == "none" else {}
    found = execute(WAYS["unlinked files"].code, isolation=isolation, settings=settings, folder=tmp_path)
    assert (found.status, found.limit) == (("ok", None) if isolation == "none" else ("limit", "disk"))


FORGE = """
import os, time
for descriptor in range(3, 64):
    try:
        os.write(descriptor, forged)
    except OSError:
        pass
time.sleep(60)
"""


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"\xff\xfe\n",
        b"[1]\n",
        b"NaN\n",
        b'{"kind": "result", "value": 1e999}\n',
        b'{"kind": "magic"}\n',
        b'{"kind": "call", "id": "x", "name": 1}\n',
        b'{"kind": "ended", "status": "great"}\n',
        b'{"kind": "ended", "status": "limit", "limit": "luck", "error": ""}\n',
        b'{"kind": "result", "value": "\\ud800"}\n',
        b'{"kind": "started"}\n',
        b'{"kind": "result", "value": ' + b"[" * 9000 + b"\n",
        b"x" * 1_000_000,
    ],
)
def test_a_forged_message_is_the_code_s_own_failure(line: bytes) -> None:
    source = f"{line[:1]!r} * {len(line)}" if len(set(line)) == 1 else repr(line)
    found = execute(f"forged = {source}\n{FORGE}")
    assert (found.status, found.error_type) == ("failed", "ProtocolError")


FOLDERS = {
    "a file that comes and goes": (
        "import os\nfor n in range(9): open(str(n), 'wb').write(bytes(1 << 20))\n"
        "while True:\n    open('a', 'w').close()\n    os.unlink('a')"
    ),
    "a closed folder": (
        "import os, time\nos.mkdir('d')\nfor n in range(9): open(f'd/{n}', 'wb').write(bytes(1 << 20))\n"
        "os.chmod('d', 0)\ntime.sleep(60)"
    ),
}


@pytest.mark.parametrize("way", FOLDERS)
def test_nothing_in_a_working_folder_hides_from_the_limit_of_its_size(way: str, tmp_path: Path) -> None:
    assert execute(FOLDERS[way], folder=tmp_path, wall_s=5).limit == "disk"
    for folder in tmp_path.glob("d"):
        folder.chmod(0o700)


@both
def test_changing_what_the_harness_rests_on_changes_no_report(isolation: str) -> None:
    code = (
        "import builtins, json, os, sys\njson.dumps = json.loads = os.write = os.read = os.getpid = print\n"
        "sys.modules['json'] = sys.modules['harness'] = sys.modules['__main__'] = None\n"
        "sys.stdout = sys.__stdout__ = sys.stderr = None\nraise KeyError('mine')"
    )
    found = execute(code, isolation=isolation)
    assert (found.status, found.error_type, found.error) == ("failed", "KeyError", "line 5: 'mine'")


def test_a_forged_ending_is_only_of_the_run_that_forged_it() -> None:
    """A run may say of itself what it likes; nothing of it is there for the next."""
    lines = b'{"kind": "result", "value": 7}\n{"kind": "ended", "status": "ok"}\n'
    forge = f"forged = {lines!r}\n{FORGE}"
    replay = "import harness\nharness.result(harness.inputs)\n1 / 0"

    async def runs(sandbox: Sandbox) -> list[Execution]:
        return [await sandbox.run(code, inputs={"n": n}) for n, code in enumerate([forge, replay])]

    first, second = in_sandbox(runs)
    assert (first.status, first.value) == ("ok", 7)
    assert (second.status, second.error_type, second.value) == ("failed", "ZeroDivisionError", {"n": 1})


async def answer(name: str, arguments: Mapping[str, Any]) -> Any:
    await asyncio.sleep(arguments.get("wait", 0))
    return "x" * (1 << 20)


@pytest.mark.parametrize("calls", [(1000, {"wait": 60}), (200, {})])
def test_a_flood_of_calls_is_the_code_s_own_failure(calls: tuple[int, dict[str, Any]]) -> None:
    """Too many at once, or answers that are never read and would pile up on the host."""
    count, arguments = calls
    line = json.dumps({"kind": "call", "id": 1, "name": "n", "arguments": arguments}) + "\n"
    pause = "" if arguments else "time.sleep(0.01)"
    code = (
        "import os, time\nheld = os.listdir('/proc/self/fd')\n"
        "channel = next(int(n) for n in held if 'socket' in os.path.realpath(f'/proc/self/fd/{n}'))\n"
        f"for _ in range({count}):\n    os.write(channel, {line.encode()!r})\n    {pause}\ntime.sleep(60)"
    )
    assert execute(code, handler=answer).error_type == "ProtocolError"
