import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params
from gradeflow.errors import JudgeError, SandboxError
from gradeflow.sandbox import Execution, Sandbox, probe

SETTINGS = params.Sandbox(
    isolation="auto",
    wall_s=10.0,
    cpu_s=10,
    memory_mb=256,
    processes=16,
    disk_mb=4,
    output_kb=16,
    parallel=2,
)


def in_sandbox(use: Callable[[Sandbox], Awaitable[Any]], isolation: str = "auto", **settings: Any) -> Any:
    async def within() -> Any:
        sandbox = Sandbox(SETTINGS.model_copy(update={"isolation": isolation, **settings}))
        try:
            return await use(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(within())


def execute(code: str, *, isolation: str = "auto", settings: Mapping[str, Any] | None = None, **run: Any) -> Execution:
    return in_sandbox(lambda sandbox: sandbox.run(code, **run), isolation, **(settings or {}))


both = pytest.mark.parametrize("isolation", ["auto", "none"])


@both
def test_code_reads_its_inputs_and_its_last_result_counts(isolation: str) -> None:
    code = "import harness\nharness.result(1)\nharness.result([harness.inputs['a'], {'b': None}])\nprint('é')"
    found = execute(code, isolation=isolation, inputs={"a": "x"})
    assert (found.status, found.value, found.stdout) == ("ok", ["x", {"b": None}], "é\n")


def test_the_layer_is_named() -> None:
    async def layer(sandbox: Sandbox) -> str:
        await sandbox.run("")
        return sandbox.layer

    assert in_sandbox(layer) == "bubblewrap"
    assert in_sandbox(layer, "none") == "none"


@pytest.mark.parametrize(
    ("code", "error_type", "error"),
    [
        ("x = 1\n\n1 / 0", "ZeroDivisionError", "line 3: division by zero"),
        ("x = 1\nif x\n", "SyntaxError", "line 2: expected ':'"),
        ("import sys\nsys.exit(3)", "SystemExit", "line 2: exit status 3"),
        ("class E(Exception):\n  def __str__(self): return 1\nraise E", "E", "line 3: "),
        ("import os\nos._exit(0)", "Exited", "the process ended with status 0 before the code had finished"),
        ("import os\nos.kill(os.getpid(), 11)", "Killed", "ended by SIGSEGV"),
        (
            "import harness\nharness.result(float('nan'))",
            "ValueError",
            "line 2: Out of range float values are not JSON compliant",
        ),
        ("import harness\nharness.call('x')", "RuntimeError", "line 2: nothing answers calls in this run"),
    ],
)
def test_a_failure_names_its_exception_and_line(code: str, error_type: str, error: str) -> None:
    found = execute(code)
    assert (found.status, found.error_type, found.limit) == ("failed", error_type, None)
    assert found.error.startswith(error)


def test_a_traceback_shows_the_lines_of_the_code_and_nothing_of_the_harness() -> None:
    stderr = execute("def f():\n    raise KeyError('k')\nf()").stderr
    assert 'File "script.py", line 2, in f' in stderr
    assert "raise KeyError('k')" in stderr
    assert "harness" not in stderr


def test_a_clean_exit_is_ok_and_ends_like_an_interpreter() -> None:
    code = (
        "import atexit, sys, threading\natexit.register(print, 'bye')\n"
        "threading.Timer(0.05, print, ['late']).start()\nsys.exit(0)"
    )
    found = execute(code)
    assert (found.status, found.stdout) == ("ok", "late\nbye\n")


def test_code_runs_as_the_main_module() -> None:
    code = (
        "import pickle, dataclasses, harness\n@dataclasses.dataclass\nclass A:\n    x: int\n"
        "if __name__ == '__main__':\n    harness.result(pickle.loads(pickle.dumps(A(3))).x)"
    )
    assert execute(code).value == 3


async def double(name: str, arguments: Mapping[str, Any]) -> Any:
    if name == "refuse":
        raise LookupError("no such thing")
    await asyncio.sleep(arguments.get("wait", 0))
    return {"name": name, "twice": arguments["x"] * 2}


@both
def test_calls_go_to_the_handler_and_its_answers_come_back(isolation: str) -> None:
    code = "import harness\nharness.result([harness.call('a', x=2), harness.call('b', x='é')])"
    found = execute(code, isolation=isolation, handler=double)
    assert found.value == [{"name": "a", "twice": 4}, {"name": "b", "twice": "éé"}]


def test_calls_under_gather_overlap() -> None:
    code = (
        "import asyncio, harness, time\nasync def main():\n    began = time.monotonic()\n"
        "    replies = await asyncio.gather(*(harness.acall('n', x=i, wait=0.3) for i in range(8)))\n"
        "    return [r['twice'] for r in replies], time.monotonic() - began\n"
        "harness.result(asyncio.run(main()))"
    )
    values, seconds = execute(code, handler=double).value
    assert values == [0, 2, 4, 6, 8, 10, 12, 14]
    assert seconds < 1.2


def test_calls_from_threads_reach_their_own_callers() -> None:
    code = (
        "import harness\nfrom concurrent.futures import ThreadPoolExecutor as Pool\nwith Pool(6) as pool:\n"
        "    replies = list(pool.map(lambda i: harness.call('n', x=i, wait=0.01 * (6 - i)), range(6)))\n"
        "harness.result([r['twice'] for r in replies])"
    )
    assert execute(code, handler=double).value == [0, 2, 4, 6, 8, 10]


def test_coroutines_run_without_asyncio_and_at_the_top_level() -> None:
    code = (
        "import harness, sys\nasync def f(x):\n    return (await harness.acall('n', x=x))['twice']\n"
        "harness.result([await f(1), harness.drive(f(2)), ''.join(['async', 'io']) in sys.modules])"
    )
    assert execute(code, handler=double).value == [2, 4, False]


@pytest.mark.parametrize("ask", ["harness.call('refuse')", "await harness.acall('refuse')"])
def test_what_the_handler_refuses_is_a_runtime_error_inside(ask: str) -> None:
    code = f"import harness\ntry:\n    {ask}\nexcept RuntimeError as error:\n    harness.result(str(error))"
    assert execute(code, handler=double).value == "no such thing"


def test_a_fault_of_the_handler_ends_the_run_and_reaches_the_caller_unchanged() -> None:
    fault = JudgeError("no verdict", cause="no_verdict")

    async def break_down(name: str, arguments: Mapping[str, Any]) -> Any:
        raise fault

    code = "import harness, time\ntry:\n    harness.call('x')\nexcept BaseException:\n    pass\ntime.sleep(60)"
    with pytest.raises(JudgeError) as caught:
        execute(code, handler=break_down)
    assert caught.value is fault


SLEEP = "import time\ntime.sleep(60)"
SPIN = "while True: pass"
FORKS = "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(60)\n"
THREADS = (
    "import threading, time\nfor _ in range(100):\n"
    "    threading.Thread(target=time.sleep, args=[60], daemon=True).start()"
)


@pytest.mark.parametrize(
    ("code", "limit", "settings"),
    [
        (SLEEP, "wall", {"wall_s": 0.3}),
        ("import harness\nharness.call('x', x=1, wait=60)", "wall", {"wall_s": 0.3}),
        ("import os\nos.closerange(0, 99)\n" + SLEEP, "wall", {"wall_s": 0.3}),
        (SPIN, "cpu", {"cpu_s": 1}),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n" + SPIN, "cpu", {"cpu_s": 1}),
        ("x = bytearray(1 << 30)", "memory", {}),
        ("x = []\nwhile True: x.append(bytearray(1 << 16))", "memory", {}),
        ("x = 'a'\nwhile True: x += x", "memory", {}),
        (FORKS, "processes", {}),
        (THREADS, "processes", {"memory_mb": 4096}),
        ("with open('big', 'wb') as f:\n    while True: f.write(bytes(1 << 16))", "disk", {}),
        ("n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 20)); n += 1", "disk", {}),
        ("while True: print('x' * 1000)", "output", {}),
        ("import harness\nharness.result('x' * 20_000)", "output", {}),
    ],
)
def test_each_limit_ends_the_run_and_is_named(code: str, limit: str, settings: dict[str, Any]) -> None:
    found = execute(code, settings=settings, handler=double)
    assert (found.status, found.limit, found.error_type) == ("limit", limit, None)
    assert found.error


def test_a_working_folder_that_grows_past_the_disk_limit_ends_the_run(tmp_path: Path) -> None:
    code = "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 20)); n += 1"
    assert execute(code, folder=tmp_path, settings={"disk_mb": 8}).limit == "disk"


def test_output_is_cut() -> None:
    found = execute("print('x' * 30_000)")
    assert found.status == "ok"
    assert found.stdout == "x" * 16384 + "\n[cut at 16384 bytes]"


def reached(code: str, isolation: str, **run: Any) -> Any:
    """What the code handed over, or None when it could not."""
    found = execute(code, isolation=isolation, **run)
    assert found.status in {"ok", "failed"}
    return found.value


@both
def test_no_connection_to_the_loopback_of_the_host(isolation: str) -> None:
    code = (
        "import harness, socket\n"
        "socket.create_connection(('127.0.0.1', harness.inputs['port']), timeout=2).close()\n"
        "harness.result('connected')"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        value = reached(code, isolation, inputs={"port": server.getsockname()[1]})
    assert value == ("connected" if isolation == "none" else None)


@both
def test_no_abstract_socket_of_the_host(isolation: str) -> None:
    name = f"\0gradeflow-test-{os.getpid()}"
    code = (
        "import harness, socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(harness.inputs['name'])\n"
        "harness.result('connected')"
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        value = reached(code, isolation, inputs={"name": name})
    assert value == ("connected" if isolation == "none" else None)


@both
def test_no_file_of_the_host(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "answer.csv").write_text("42")
    code = "import harness\nharness.result(open(harness.inputs['path']).read())"
    value = reached(code, isolation, inputs={"path": str(tmp_path / "answer.csv")})
    assert value == ("42" if isolation == "none" else None)


@both
def test_no_file_of_the_project(isolation: str) -> None:
    code = "import harness\nharness.result(open(harness.inputs['path']).readline())"
    value = reached(code, isolation, inputs={"path": str(Path(__file__).resolve())})
    assert value == ("import asyncio\n" if isolation == "none" else None)


@both
def test_no_link_out_of_the_working_folder(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("42")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "link").symlink_to(tmp_path / "private")
    code = "import harness\nharness.result(open('link').read())"
    assert reached(code, isolation, folder=tmp_path / "work") == ("42" if isolation == "none" else None)


@both
def test_no_environment_of_the_host(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADEFLOW_TEST_KEY", "secret")
    code = (
        "import harness, os\nfound = list(os.environ.values())\n"
        "for name in os.listdir('/proc'):\n    try: found.append(open(f'/proc/{name}/environ').read())\n"
        "    except OSError: pass\n"
        "harness.result(['secret' in ' '.join(found), 'GRADEFLOW_TEST_KEY' in os.environ])"
    )
    assert reached(code, isolation)[1] is False
    assert reached(code, isolation)[0] is (isolation == "none" and "GRADEFLOW_TEST_KEY" in host_environ())


def host_environ() -> str:
    """What /proc shows of this process: the environment it was started with, not what was set since."""
    return Path("/proc/self/environ").read_text(errors="replace")


@both
def test_no_process_of_the_host_is_seen_or_killed(isolation: str) -> None:
    code = "import harness, os\nos.kill(harness.inputs['pid'], 15)\nharness.result('killed')"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim:
        value = reached(code, isolation, inputs={"pid": victim.pid})
        if isolation == "none":
            assert value == "killed"
            assert victim.wait(10) == -signal.SIGTERM
        else:
            assert value is None
            assert victim.poll() is None
            victim.kill()


@both
@pytest.mark.parametrize("target", ["{folder}/x", "/proc/sys/kernel/hostname"])
def test_no_writing_outside(isolation: str, target: str, tmp_path: Path) -> None:
    if isolation == "none" and target.startswith("/proc"):
        pytest.skip("would rename this machine")
    code = "import harness\nopen(harness.inputs['path'], 'w').write('x')\nharness.result('written')"
    value = reached(code, isolation, inputs={"path": target.format(folder=tmp_path)})
    assert value == ("written" if isolation == "none" else None)
    assert (tmp_path / "x").exists() is (isolation == "none")


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


@both
def test_a_working_folder_lives_over_runs(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_text("given")

    async def twice(sandbox: Sandbox) -> Any:
        await sandbox.run("open('made.py', 'w').write('x = ' + repr(open('given.txt').read()))", folder=tmp_path)
        return (await sandbox.run("import made, harness\nharness.result(made.x)", folder=tmp_path)).value

    assert in_sandbox(twice, isolation) == "given"
    assert (tmp_path / "made.py").read_text() == "x = 'given'"


def test_installed_packages_are_importable_where_asked_for() -> None:
    code = "import numpy, harness\nharness.result(int(numpy.arange(4).sum()))"
    assert execute(code).error_type == "ModuleNotFoundError"
    assert execute(code, packages=True, memory_mb=1024).value == 6


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


def test_a_flood_of_calls_is_the_code_s_own_failure() -> None:
    code = (
        "import asyncio, harness\nasync def main():\n"
        "    await asyncio.gather(*(harness.acall('n', x=1, wait=60) for _ in range(1000)))\n"
        "asyncio.run(main())"
    )
    assert execute(code, handler=double).error_type == "ProtocolError"


def test_an_interpreter_ended_from_outside_is_a_fault() -> None:
    async def end_it(sandbox: Sandbox) -> None:
        run = asyncio.create_task(sandbox.run(SLEEP))
        await asyncio.sleep(1)
        for interpreter in sandbox._live:
            interpreter.process.kill()
        await run

    with pytest.raises(SandboxError) as caught:
        in_sandbox(end_it)
    assert caught.value.cause == "sandbox"


def test_an_interpreter_that_died_while_it_waited_is_replaced() -> None:
    async def kill_waiting(sandbox: Sandbox) -> Execution:
        await sandbox.run("")
        await asyncio.sleep(0.5)
        for interpreter in sandbox._ready:
            interpreter.process.kill()
            interpreter.process.wait()
        return await sandbox.run("")

    assert in_sandbox(kill_waiting).status == "ok"


def test_no_more_runs_at_once_than_allowed() -> None:
    async def five(sandbox: Sandbox) -> float:
        await sandbox.run("")
        began = time.monotonic()
        await asyncio.gather(*(sandbox.run("import time\ntime.sleep(0.2)") for _ in range(5)))
        return time.monotonic() - began

    assert in_sandbox(five) > 0.6


def test_a_call_may_be_answered_by_further_runs_whatever_the_number_at_once() -> None:
    async def nested(sandbox: Sandbox) -> list[Any]:
        async def answer(name: str, arguments: Mapping[str, Any]) -> Any:
            return (
                await sandbox.run("import harness\nharness.result(harness.inputs['x'] * 2)", inputs=arguments)
            ).value

        code = (
            "import asyncio, harness\nasync def main():\n"
            "    return await asyncio.gather(*(harness.acall('n', x=i) for i in range(3)))\n"
            "harness.result(asyncio.run(main()) + [harness.call('n', x=3)])"
        )
        first = await asyncio.gather(*(sandbox.run(code, handler=answer) for _ in range(3)))
        assert sandbox._slots._value == 1
        return [found.value for found in first]

    assert in_sandbox(nested, parallel=1) == [[0, 2, 4, 6]] * 3


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_close_leaves_no_process_and_no_descriptor() -> None:
    before = children(), len(list(Path("/proc/self/fd").iterdir()))

    async def some(sandbox: Sandbox) -> None:
        await asyncio.gather(*(sandbox.run("import subprocess\nsubprocess.Popen(['sleep', '60'])") for _ in range(5)))

    in_sandbox(some)
    assert (children(), len(list(Path("/proc/self/fd").iterdir()))) == before


def test_a_cancelled_run_is_ended() -> None:
    async def cancel(sandbox: Sandbox) -> float:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.run(SLEEP), 0.5)
        await sandbox.close()
        return time.monotonic() - began

    assert in_sandbox(cancel) < 5


def test_a_closed_sandbox_refuses() -> None:
    async def late(sandbox: Sandbox) -> None:
        await sandbox.close()
        await sandbox.run("")

    with pytest.raises(SandboxError, match="closed"):
        in_sandbox(late)


def test_probe_tells_which_layers_hold() -> None:
    found = asyncio.run(probe(SETTINGS))
    assert [(each.layer, each.ok) for each in found] == [("bubblewrap", True), ("none", True)]
    assert stat.S_ISREG(Path(found[0].explanation.split()[0]).stat().st_mode)
