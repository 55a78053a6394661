"""Which layer is taken, and what holds over the second one: Landlock and seccomp.

The escapes of test_escape.py run over it too; here is what it does in another way than bubblewrap.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_sandbox import SLEEP, THREADS, double

from gradeflow.errors import SetupError
from gradeflow.sandbox import Sandbox, bubblewrap, landlock, probe, run
from support.sandboxes import SETTINGS, execute, in_sandbox, without_landlock


def in_landlock(code: str, **given: Any) -> Any:
    return execute(code, isolation="landlock", **given)


def fail(*_: Any, **__: Any) -> Any:
    raise SetupError("it is missing. Get it with `pip install it`")


CLOSED = [
    "unshare",
    "--user",
    "--map-root-user",
    "sh",
    "-c",
    'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"',
    "-",
]


async def layer_of(sandbox: Sandbox) -> str:
    await sandbox.run("")
    return sandbox.layer


def test_probe_tells_which_layers_hold_and_how_to_get_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "find", fail)
    found = asyncio.run(probe(SETTINGS))
    assert [(each.layer, each.ok) for each in found] == [("bubblewrap", True), ("landlock", False), ("none", True)]
    assert str(bubblewrap.binary()) in found[0].explanation
    assert found[1].explanation == "it is missing. Get it with `pip install it`"


@without_landlock
@pytest.mark.parametrize("isolation", ["auto", "landlock"])
def test_without_bubblewrap_the_second_layer_is_taken(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "binary", fail)
    assert in_sandbox(layer_of, isolation) == "landlock"


@without_landlock
def test_where_user_namespaces_are_closed_the_second_layer_is_taken() -> None:
    if subprocess.run([*CLOSED, "sh", "-c", "! unshare --user true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces cannot be closed for a single process here")
    look = (
        "import asyncio\nfrom gradeflow import params\nfrom gradeflow.sandbox import Sandbox, probe\n"
        f"settings = params.Sandbox(**{SETTINGS.model_dump()!r})\nasync def main():\n    sandbox = Sandbox(settings)\n"
        "    await sandbox.run('')\n    print(sandbox.layer)\n    await sandbox.close()\n"
        "    print((await probe(settings))[0].explanation)\nasyncio.run(main())"
    )
    done = subprocess.run([*CLOSED, sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("landlock\n")
    assert "user namespaces are switched off: sudo sysctl -w user.max_user_namespaces=15000" in done.stdout


@pytest.mark.parametrize("isolation", ["auto", "bubblewrap", "landlock"])
def test_without_the_layers_asked_for_nothing_runs_and_each_has_its_remedy(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in (bubblewrap, landlock):
        monkeypatch.setattr(layer, "find", fail)
    with pytest.raises(SetupError, match="cannot be isolated") as caught:
        in_sandbox(layer_of, isolation)
    asked = run.ISOLATING if isolation == "auto" else [isolation]
    assert [f"{layer}: it is missing. Get it with" in str(caught.value) for layer in asked] == [True] * len(asked)
    assert str(caught.value).count("Get it with") == len(asked)


@pytest.mark.parametrize("layer", [bubblewrap, pytest.param(landlock, marks=without_landlock)])
def test_a_layer_that_lets_code_out_fails_its_self_test(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layers replaced by none at all, the ways out are found, and code does not run."""
    started = run.start

    async def unprotected(place: Any) -> Any:
        return await started(run.Place("none", place.folder, place.disk_bytes, place.packages))

    monkeypatch.setattr(run, "start", unprotected)
    monkeypatch.setattr(run, "_passed", set())
    with pytest.raises(SetupError, match="does not isolate") as caught:
        in_sandbox(layer_of, layer.__name__.rpartition(".")[2])
    for way in ("files can be read", "folders can be listed", "processes can be reached", "sockets can be reached"):
        assert way in str(caught.value)


@pytest.mark.parametrize(
    ("abi", "said"), [(-1, "missing or switched off; ABI 3 is needed"), (2, "is ABI 2; ABI 3 is needed: Linux 6.2")]
)
def test_a_kernel_without_a_fit_landlock_is_told(abi: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def syscall(self, *_: Any) -> int:
            return abi

    monkeypatch.setattr(landlock.ctypes, "CDLL", lambda *_, **__: Kernel())
    with pytest.raises(SetupError, match=said):
        landlock.find()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("PermissionError: [Errno 13] Permission denied: 'python3.11'", "must be readable"),
        ("OSError: system call 444: Operation not permitted", "--security-opt seccomp=unconfined"),
    ],
)
def test_a_complaint_has_its_remedy(said: str, remedy: str) -> None:
    assert remedy in landlock.remedy(said)


REMOVED = (
    "import os, time\nkept = []\nwhile True:\n    kept.append(open('x', 'wb'))\n"
    "    kept[-1].write(bytes(1 << 20)); kept[-1].flush(); os.unlink('x'); time.sleep(0.02)"
)


@without_landlock
@pytest.mark.parametrize(
    ("code", "limit", "settings"),
    [
        ("import time\ntime.sleep(60)", "wall", {"wall_s": 0.3}),
        ("while True: pass", "cpu", {"cpu_s": 1}),
        ("x = bytearray(1 << 30)", "memory", {}),
        (THREADS, "memory", {"processes": 200}),
        (f"{THREADS}\n{SLEEP}", "processes", {"memory_mb": 4096}),
        ("import threading\nthreading.stack_size(32768)\nrange = lambda n: iter(int, 1)\n" + THREADS, "processes", {}),
        ("import os\nos.fork()", "processes", {}),
        ("import subprocess\nsubprocess.run(['true'])", "processes", {}),
        ("with open('big', 'wb') as f:\n    while True: f.write(bytes(1 << 16))", "disk", {}),
        ("n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 20)); n += 1", "disk", {}),
        (REMOVED, "disk", {}),
        ("while True: print('x' * 1000)", "output", {}),
    ],
)
def test_each_limit_ends_the_run_and_is_named(code: str, limit: str, settings: dict[str, Any]) -> None:
    found = in_landlock(code, settings=settings)
    assert (found.status, found.limit) == ("limit", limit)


ATTEMPTS = {
    "another process's limits": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (9, 9))",
    "another process's priority": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "another process's cores": "os.sched_setaffinity(os.getppid(), {0})",
    "a signal to the group": "os.killpg(0, 0)",
    "a signal through a descriptor": "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
    "a handle on a process": "os.pidfd_open(os.getppid())",
    "tracing": "call('ptrace', 16, os.getppid(), 0, 0)",
    "another's memory": "call('process_vm_readv', os.getppid(), 0, 0, 0, 0, 0)",
    "a socket": "socket.socket(socket.AF_UNIX)",
    "a socket for datagrams": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "shared memory": "call('shmget', 0, 4096, 0o1600)",
    "a message queue": "call('mq_open', b'/q', 0o102, 0o600, 0)",
    "a key": "call('keyctl', 0, -3, 0)",
    "memory that no limit counts": "os.memfd_create('m')",
    "a user namespace": "call('unshare', 0x10000000)",
    "io_uring": "call('io_uring_setup', 1, 0)",
    "a mount": "call('mount', b'none', b'/tmp', b'tmpfs', 0, 0)",
    "another root": "os.chroot('.')",
    "another user": "os.setuid(1)",
    "a device": "os.mknod('d', 0o020600, os.makedev(1, 5))",
    "the disk": "os.open('/dev/vda', os.O_RDONLY)",
    "a hard link to the host's file": "os.link(given['secret'], 'link')",
    "the host's file by a name of its own": "open('/proc/self/root' + given['secret'])",
    "the host's folder": "os.listdir(os.path.dirname(given['secret']))",
    "the processes": "os.listdir('/proc')",
    "cutting a file": "os.truncate(given['secret'], 0)",
    "cutting what may be read": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "removing a file": "os.unlink(given['secret'])",
    "moving a file in": "os.rename(given['secret'], 'stolen')",
    "an attribute": "os.setxattr(given['secret'], 'user.x', b'1')",
    "a file in /tmp": "open('/tmp/gradeflow-test', 'w')",
    "a file in /dev/shm": "open('/dev/shm/gradeflow-test', 'w')",
}
NUMBERS = {  # x86_64
    "ptrace": 101, "process_vm_readv": 310, "shmget": 29, "mq_open": 240, "keyctl": 250, "unshare": 272,
    "io_uring_setup": 425, "mount": 165,
}  # fmt: skip
TRY = """
import ctypes, fcntl, harness, os, resource, socket
given = harness.inputs
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if libc.syscall(given['numbers'][name], *arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
opened = []
for name, attempt in given['attempts'].items():
    try:
        eval(attempt)
    except OSError:
        continue
    opened.append(name)
harness.result(opened)
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("42")
    path.chmod(0o600)
    return path


@without_landlock
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the system calls are those of x86_64")
def test_what_namespaces_would_hide_is_refused(secret: Path) -> None:
    inputs = {"attempts": ATTEMPTS, "numbers": NUMBERS, "secret": str(secret)}
    found = in_landlock(TRY, inputs=inputs)
    assert (found.status, found.value, found.error) == ("ok", [], "")
    assert secret.read_text() == "42"


def test_the_attempts_are_real_ones(secret: Path) -> None:
    """A control: unprotected, a good part of them succeeds, so a misspelt one would show."""
    harmless = [
        "another process's cores", "a handle on a process", "a socket", "a socket for datagrams", "netlink",
        "shared memory", "memory that no limit counts", "a hard link to the host's file", "the host's folder",
        "the host's file by a name of its own", "the processes", "cutting a file", "moving a file in",
    ]  # fmt: skip
    inputs = {"attempts": {name: ATTEMPTS[name] for name in harmless}, "numbers": NUMBERS, "secret": str(secret)}
    cores = os.sched_getaffinity(0)
    try:
        assert execute(TRY, isolation="none", inputs=inputs).value == harmless
    finally:
        os.sched_setaffinity(0, cores)


@without_landlock
def test_changes_of_mode_owner_and_time_are_ignored_so_that_copying_works(secret: Path, tmp_path: Path) -> None:
    code = (
        "import harness, os, shutil\nopen('a', 'w').write('x')\nshutil.copy2('a', 'b')\nshutil.copytree('.', 'c/d',"
        " ignore=shutil.ignore_patterns('c'))\n"
        "for change in (lambda p: os.chmod(p, 0o666), lambda p: os.chown(p, 1, 1), lambda p: os.utime(p, (0, 0))):\n"
        "    change(harness.inputs['secret'])\nharness.result(sorted(os.listdir('c/d')))"
    )
    before = secret.stat()
    assert in_landlock(code, inputs={"secret": str(secret)}).value == ["a", "b"]
    after = secret.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (before.st_mode, before.st_uid, before.st_mtime_ns)


@without_landlock
def test_what_honest_code_needs_works() -> None:
    code = (
        "import asyncio, concurrent.futures, harness, os, sqlite3, tempfile, threading\n"
        "async def main():\n    return await asyncio.gather(*(harness.acall('n', x=i) for i in range(3)))\n"
        "with tempfile.TemporaryFile() as file:\n    file.write(b'x')\n"
        "with concurrent.futures.ThreadPoolExecutor(2) as pool:\n    squares = [*pool.map(abs, [1, -4])]\n"
        "base = sqlite3.connect('base.db')\nbase.execute('create table t (x)')\nbase.commit()\n"
        "os.mkdir('d'); os.rename('base.db', 'd/base.db'); os.symlink('d', 'e'); os.isatty(1)\n"
        "replies = asyncio.run(main())\nharness.result([[r['twice'] for r in replies], squares, os.listdir('e')])"
    )
    found = in_landlock(code, handler=double)
    assert (found.error, found.value) == ("", [[0, 2, 4], [1, 4], ["base.db"]])


@without_landlock
def test_installed_packages_are_importable_where_asked_for() -> None:
    code = "import pandas, harness\nharness.result(int(pandas.Series([1, 2]).sum()))"
    assert in_landlock(code).error_type == "ModuleNotFoundError"
    assert in_landlock(code, packages=True, memory_mb=2048).value == 3


@without_landlock
def test_no_privileges_and_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADEFLOW_TEST_KEY", "secret")
    code = (
        "import harness, os\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())\n"
        "powers = [int(status[name], 16) for name in ('CapEff', 'CapPrm', 'CapInh', 'CapAmb')]\n"
        "harness.result([powers, int(status['NoNewPrivs']), sorted(os.environ)])"
    )
    powers, no_new, names = in_landlock(code).value
    assert (powers, no_new) == ([0, 0, 0, 0], 1)
    assert set(names) - {"LC_CTYPE"} == set(bubblewrap.ENVIRONMENT)


@without_landlock
def test_the_private_folder_is_gone_after_the_run() -> None:
    folder = Path(in_landlock("import harness, os\nharness.result(os.getcwd())").value)
    assert not folder.exists()
    assert folder.name.startswith("gradeflow-sandbox-")


@without_landlock
def test_code_ends_with_its_host(tmp_path: Path) -> None:
    """`kill -9` of the host leaves nothing running."""
    host = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom gradeflow import params\n"
        "from gradeflow.sandbox import Sandbox\n"
        f"settings = params.Sandbox(**{SETTINGS.model_dump() | {'isolation': 'landlock'}!r})\n"
        'code = \'import os, time\\nopen("pid", "w").write(str(os.getpid()))\\ntime.sleep(60)\'\n'
        f"asyncio.run(Sandbox(settings).run(code, folder=Path({str(tmp_path)!r})))\n"
    )
    with subprocess.Popen([sys.executable, "-c", host]) as process:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        inside = int((tmp_path / "pid").read_text())
        assert is_running(inside)
        process.kill()
    wait_for(lambda: not is_running(inside))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@without_landlock
@pytest.mark.skipif(os.geteuid() != 0, reason="tests run by an ordinary user show the same")
def test_an_ordinary_user_has_both_layers_too() -> None:
    look = (
        "import asyncio\nfrom gradeflow import params\nfrom gradeflow.sandbox import probe\n"
        f"settings = params.Sandbox(**{SETTINGS.model_dump()!r})\n"
        "print([each.layer for each in asyncio.run(probe(settings)) if each.ok])"
    )
    modules = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ordinary = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "env": modules}
    try:
        subprocess.run([sys.executable, "-c", "import gradeflow.params"], check=True, capture_output=True, **ordinary)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no ordinary user can run {sys.executable} with its packages here")
    done = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True, **ordinary)
    assert done.stdout.strip() == "['bubblewrap', 'landlock', 'none']"
