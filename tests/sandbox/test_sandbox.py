import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gradeflow.errors import JudgeError, SandboxError
from gradeflow.sandbox import Execution, Sandbox
from gradeflow.sandbox.interpreter import Interpreter
from support.sandboxes import both, execute, in_sandbox


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


VALUES = [
    None,
    True,
    0,
    -7,
    10**30,
    0.1,
    -1e-300,
    1e22,
    "",
    'é"\\\n\x00\u2028',
    "\U0001f600",
    [],
    {},
    [[1], {"a": [None]}],
]


def test_values_pass_both_ways_unchanged() -> None:
    code = "import harness\nharness.result(harness.inputs['values'])"
    found = execute(code, inputs={"values": VALUES}).value
    assert found == VALUES
    assert [type(value) for value in found] == [type(value) for value in VALUES]


def test_keys_become_text_and_a_lone_surrogate_is_replaced() -> None:
    code = "import harness\nharness.result({1: (2, 3), None: True, 'a': '\\ud800'})"
    assert execute(code).value == {"1": [2, 3], "null": True, "a": "?"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{1}", "TypeError: line 2: Object of type set is not JSON serializable"),
        ("float('nan')", "ValueError: line 2: Out of range float values are not JSON compliant"),
        ("{(1,): 2}", "TypeError: line 2: keys must be str, int, float, bool or None, not tuple"),
    ],
)
def test_a_value_that_json_has_not_is_an_error_of_the_code(value: str, said: str) -> None:
    found = execute(f"import harness\nharness.result({value})")
    assert found.status == "failed"
    assert f"{found.error_type}: {found.error}".startswith(said)


def test_a_value_within_itself_is_an_error_of_the_code() -> None:
    found = execute("import harness\nloop = []\nloop.append(loop)\nharness.result(loop)")
    assert (found.status, found.error_type) == ("failed", "ValueError")


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


async def one_waits(sandbox: Sandbox) -> Interpreter:
    while not sandbox._ready:  # noqa: ASYNC110 - a start in the background is no event
        await asyncio.sleep(0.01)
    return sandbox._ready[-1]


@pytest.mark.parametrize("in_a_folder", [False, True])
def test_packages_that_code_names_are_loaded_when_it_starts_and_wait_so_for_the_next(
    in_a_folder: bool, tmp_path: Path
) -> None:
    code = "import sys\nloaded = 'numpy' in sys.modules\nimport numpy, harness\nharness.result(loaded)"
    run = {"packages": True, "memory_mb": 1024, "folder": tmp_path if in_a_folder else None}

    async def twice(sandbox: Sandbox) -> list[Any]:
        first = await sandbox.run(code, **run)
        prepared = await one_waits(sandbox)
        second = await sandbox.run(code, **run)
        await prepared.exited()
        return [first.value, second.value]

    assert in_sandbox(twice) == [True, True]


def test_a_working_folder_is_the_one_of_that_name_now(tmp_path: Path) -> None:
    """An interpreter may wait with a folder that is gone, and files may come while it waits."""
    work = tmp_path / "work"
    code = "import numpy, os, harness\nharness.result({name: open(name, 'r+').read() for name in os.listdir()})"

    async def thrice(sandbox: Sandbox) -> list[Any]:
        found = []
        for change in (work.mkdir, lambda: None, lambda: (work.rename(tmp_path / "old"), work.mkdir())):
            change()
            (work / f"{len(found)}").write_text("given")
            (work / f"{len(found)}").chmod(0o600)
            found.append((await sandbox.run(code, folder=work, packages=True, memory_mb=1024)).value)
            await one_waits(sandbox)
        return found

    assert in_sandbox(thrice) == [{"0": "given"}, {"0": "given", "1": "given"}, {"2": "given"}]


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


def test_close_ends_runs_that_are_busy_wait_for_their_host_or_for_their_turn() -> None:
    async def never(*_: Any) -> None:
        await asyncio.sleep(60)

    async def use(sandbox: Sandbox) -> list[Any]:
        codes = ["import harness\nharness.call('wait')", "while True: pass", "while True: pass", "pass"]
        runs = [asyncio.create_task(sandbox.run(code, handler=never)) for code in codes]
        await asyncio.sleep(0.5)
        await asyncio.wait_for(sandbox.close(), 5)
        return await asyncio.gather(*runs, return_exceptions=True)

    assert [type(ended) for ended in in_sandbox(use)] == [SandboxError] * 4


READS_AND_WRITES = """
import harness
found = {}
for name, path in harness.inputs.items():
    found[name] = open(path).read()
    for mode in ("w", "a"):
        try:
            open(path, mode)
        except OSError:
            pass
        else:
            found[name] = "written"
harness.result(found)
"""


@both
def test_what_is_made_readable_is_seen_at_its_own_path_and_cannot_be_changed(tmp_path: Path, isolation: str) -> None:
    (tmp_path / "shown").mkdir()
    file, other = tmp_path / "shown" / "a.txt", tmp_path / "b.txt"
    for path in (file, other):
        path.write_text(path.stem)
    asked = {"in a folder": str(file), "a file": str(other)}
    seen = execute(READS_AND_WRITES, isolation=isolation, inputs=asked, readable=[tmp_path / "shown", other])
    if isolation == "none":
        assert seen.status == "ok"
    else:
        assert seen.value == {"in a folder": "a", "a file": "b"}, seen.error
        hidden = execute(READS_AND_WRITES, isolation=isolation, inputs={"a file": str(other)}, readable=[file])
        assert hidden.error_type in {"FileNotFoundError", "PermissionError"}
