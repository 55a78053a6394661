"""`Sandbox`: runs of model-written code, each in an isolated interpreter of its own."""

import asyncio
import contextlib
import os
import re
import tempfile
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradeflow import params
from gradeflow.errors import Fault, SandboxError, SetupError
from gradeflow.sandbox import bubblewrap
from gradeflow.sandbox.conversation import Bounds, Conversation, Handler, Limit
from gradeflow.sandbox.interpreter import Interpreter, Layer, Place, start

OPEN_FILES = 256


@dataclass(frozen=True, slots=True)
class Execution:
    """How the code ended. `error` has its message with the line, or the limit in words."""

    status: Literal["ok", "failed", "limit"]
    value: Any
    stdout: str
    stderr: str
    error_type: str | None
    error: str
    limit: Limit | None
    seconds: float


class Probe(NamedTuple):
    layer: Layer
    ok: bool
    explanation: str


class _Slot:
    """One of the runs at once. A run that waits for its host lends it: the answer may come from a run too."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = False
        self._waiting = 0

    async def __aenter__(self) -> "_Slot":
        await self._take()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._give_back()

    def lending(self, handler: Handler) -> Handler:
        async def handle(name: str, arguments: Mapping[str, Any]) -> Any:
            self._waiting += 1
            self._give_back()
            over = False
            try:
                return await handler(name, arguments)
            except (Fault, asyncio.CancelledError):
                over = True
                raise
            finally:
                self._waiting -= 1
                if not over and self._waiting == 0:
                    await self._take()

        return handle

    async def _take(self) -> None:
        await self._slots.acquire()
        if self._held or self._waiting:  # another call of this run began or ended meanwhile
            self._slots.release()
        else:
            self._held = True

    def _give_back(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()


class Sandbox:
    """Runs model-written code; at most `settings.parallel` at once, in one event loop."""

    def __init__(self, settings: params.Sandbox) -> None:
        self.layer: Literal["bubblewrap", "none", ""] = "none" if settings.isolation == "none" else ""
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.parallel)
        self._testing = asyncio.Lock()
        self._ready: deque[Interpreter] = deque()
        self._starting = 0
        self._live: set[Interpreter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(
        self,
        code: str,
        *,
        inputs: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        handler: Handler | None = None,
        wall_s: float | None = None,
        memory_mb: int | None = None,
        packages: bool = False,
    ) -> Execution:
        """Run a script in a private folder, or in `folder`; `packages` lets it import what is installed.

        Raises:
            SandboxError: the sandbox broke; the code is not to blame.
            SetupError: this machine cannot isolate, and how to mend that.
            Fault: what `handler` raised.
        """
        await self._prepare()
        async with _Slot(self._slots) as slot:
            interpreter = await self._take(folder, packages=packages)
            try:
                job = self._job(code, inputs or {}, memory_mb, packages=packages)
                lending = slot.lending(handler) if handler else None
                return await self._hold(interpreter, job, lending, wall_s or self._settings.wall_s)
            finally:
                self._live.discard(interpreter)
                self._in_background(interpreter.bury())

    async def close(self) -> None:
        """End what runs and what waits. A run in flight raises SandboxError."""
        self._closed = True
        for interpreter in [*self._ready, *self._live]:
            interpreter.kill()
        while self._ready:
            await self._ready.pop().bury()
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def _hold(
        self, interpreter: Interpreter, job: Mapping[str, Any], handler: Handler | None, wall_s: float
    ) -> Execution:
        settings = self._settings
        bounds = Bounds(wall_s, settings.cpu_s, settings.disk_mb << 20, settings.output_kb << 10)
        conversation = Conversation(interpreter, bounds, handler)
        ending = await conversation.hold(job)
        return Execution(
            ending.status,
            conversation.value,
            conversation.stdout,
            conversation.stderr,
            ending.error_type,
            ending.error,
            ending.limit,
            conversation.seconds,
        )

    def _job(self, code: str, inputs: Mapping[str, Any], memory_mb: int | None, *, packages: bool) -> dict[str, Any]:
        settings = self._settings
        limits = {
            "cpu": settings.cpu_s,
            "memory": (memory_mb or settings.memory_mb) << 20,
            "processes": settings.processes if self._counts_processes() else None,
            "file": settings.disk_mb << 20,
            "files": OPEN_FILES,
            "output": settings.output_kb << 10,
        }
        return {
            "code": code,
            "inputs": dict(inputs),
            "limits": limits,
            "paths": list(bubblewrap.packages()) if packages else [],
        }

    def _counts_processes(self) -> bool:
        """Whether the kernel counts processes by user namespace; older ones count all of this user's."""
        release = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
        return self.layer == "bubblewrap" and release >= [5, 14]

    async def _prepare(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox is closed", cause="sandbox")
        if self.layer:
            return
        async with self._testing:
            if not self.layer:
                await _self_test(self._settings)
                self.layer = "bubblewrap"

    async def _take(self, folder: Path | None, *, packages: bool) -> Interpreter:
        place = self._place(folder, packages=packages)
        if folder is not None or packages or place.layer == "none":
            interpreter = await start(place)
        else:
            interpreter = self._waiting() or await start(place)
            self._refill(place)
        self._live.add(interpreter)
        return interpreter

    def _place(self, folder: Path | None, *, packages: bool) -> Place:
        layer: Layer = "none" if self.layer == "none" else "bubblewrap"
        return Place(layer, folder.resolve() if folder else None, self._settings.disk_mb << 20, packages)

    def _waiting(self) -> Interpreter | None:
        while self._ready:
            interpreter = self._ready.popleft()
            if interpreter.alive:
                return interpreter
            self._in_background(interpreter.bury())
        return None

    def _refill(self, place: Place) -> None:
        while len(self._ready) + self._starting < self._settings.parallel:
            self._starting += 1
            self._in_background(self._start_one(place))

    async def _start_one(self, place: Place) -> None:
        """A failure here shows when the next run finds nothing waiting and starts its own."""
        try:
            with contextlib.suppress(SandboxError):
                interpreter = await start(place)
                if self._closed:
                    await interpreter.bury()
                else:
                    self._ready.append(interpreter)
        finally:
            self._starting -= 1

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def probe(settings: params.Sandbox) -> list[Probe]:
    """Which layers hold on this machine, and for the others what is missing and how to get it."""
    try:
        await _self_test(settings)
    except SetupError as error:
        found = Probe("bubblewrap", ok=False, explanation=str(error))
    else:
        found = Probe("bubblewrap", ok=True, explanation=f"{bubblewrap.binary()} isolates")
    return [found, Probe("none", ok=True, explanation="no isolation; only when sandbox.isolation says so")]


SELF_TEST = """
import os, harness
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
harness.result({
    "the host's files are in sight": os.path.exists(harness.inputs["secret"]),
    "other processes are in sight": sum(name.isdigit() for name in os.listdir("/proc")) > 3,
    "the host's environment is in sight": not os.environ.keys().isdisjoint(harness.inputs["names"]),
    "there is a network": len(open("/proc/net/dev").read().splitlines()) > 3,
    "privileges are left": int(status["CapEff"], 16) or int(status["NoNewPrivs"]) != 1 or os.getuid() == 0,
    "the system can be written": os.access("/usr/lib", os.W_OK) or os.access("/", os.W_OK),
})
"""
_passed: set[Path] = set()  # binaries whose isolation this process has seen hold


async def _self_test(settings: params.Sandbox) -> None:
    """Run code that looks for ways out.

    Raises:
        SetupError: naming what does not hold and how to mend it.
    """
    if (binary := bubblewrap.binary()) in _passed:
        return
    trial = Sandbox(settings.model_copy(update={"isolation": "bubblewrap", "parallel": 1}))
    trial.layer = "bubblewrap"
    with tempfile.NamedTemporaryFile(prefix="gradeflow-self-test-") as secret:
        try:
            names = sorted(set(os.environ) - set(bubblewrap.ENVIRONMENT) - {"LC_CTYPE", "PWD"})
            seen = await trial.run(SELF_TEST, inputs={"secret": secret.name, "names": names}, wall_s=30)
        except SandboxError as error:
            said = " ".join(str(error).split())
            raise SetupError(f"model-written code cannot be isolated: {said}. {bubblewrap.remedy(said)}") from None
        finally:
            await trial.close()
    if seen.status != "ok" or (open_ways := [way for way, is_open in seen.value.items() if is_open]):
        raise SetupError(f"bubblewrap does not isolate: {seen.error or '; '.join(open_ways)}")
    _passed.add(binary)
