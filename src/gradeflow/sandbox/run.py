"""`Sandbox`: runs of model-written code, each in an isolated interpreter of its own."""

import asyncio
import contextlib
import os
import re
import socket
import tempfile
from collections import deque
from collections.abc import Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradeflow import params
from gradeflow.errors import Fault, SandboxError, SetupError
from gradeflow.sandbox import bubblewrap, landlock
from gradeflow.sandbox.conversation import Bounds, Conversation, Handler, Limit
from gradeflow.sandbox.interpreter import Interpreter, Layer, Place, start

OPEN_FILES = 256
SLOW_IMPORTS = re.compile(r"^\s*(?:import|from)\s+(math_verify|numpy|pandas|scipy|sklearn)\b", re.MULTILINE)
ISOLATING: tuple[Layer, ...] = ("bubblewrap", "landlock")  # the strongest first


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
        self.layer: Layer | Literal[""] = "none" if settings.isolation == "none" else ""
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.parallel)
        self._testing = asyncio.Lock()
        self._ready: deque[Interpreter] = deque()
        self._starting: list[Place] = []
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
        readable: Collection[Path] = (),
    ) -> Execution:
        """Run a script in a private folder, or in `folder`; `packages` lets it import what is installed.

        It sees what is `readable`, folders or files of the host, at their own paths, and cannot change them.

        Raises:
            SandboxError: the sandbox broke; the code is not to blame.
            SetupError: this machine cannot isolate, and how to mend that.
            Fault: what `handler` raised.
        """
        await self._prepare()
        async with _Slot(self._slots) as slot:
            self._require_open()
            interpreter = await self._take(self._place(code, folder, readable, packages=packages))
            try:
                job = self._job(code, inputs or {}, memory_mb)
                lending = slot.lending(handler) if handler else None
                execution = await self._hold(interpreter, job, lending, wall_s or self._settings.wall_s)
                self._require_open()  # what `close` has ended is no ending of the code
                return execution
            finally:
                self._live.discard(interpreter)
                await self._put_away(interpreter)

    async def close(self) -> None:
        """End what runs and what waits. A run in flight, or one that waits for its turn, raises SandboxError."""
        self._closed = True
        while self._ready:
            await self._ready.pop().bury()
        while self._live or self._tasks:
            for interpreter in self._live:
                interpreter.kill()
            await (asyncio.gather(*self._tasks) if self._tasks else asyncio.sleep(0.002))

    async def _hold(
        self, interpreter: Interpreter, job: Mapping[str, Any], handler: Handler | None, wall_s: float
    ) -> Execution:
        settings = self._settings
        bounds = Bounds(wall_s, settings.cpu_s, settings.disk_mb << 20, settings.output_kb << 10, settings.processes)
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

    def _job(self, code: str, inputs: Mapping[str, Any], memory_mb: int | None) -> dict[str, Any]:
        settings = self._settings
        limits = {
            "cpu": settings.cpu_s,
            "memory": (memory_mb or settings.memory_mb) << 20,
            "processes": settings.processes if self._counts_processes() else None,
            "file": settings.disk_mb << 20,
            "files": OPEN_FILES,
            "output": settings.output_kb << 10,
        }
        return {"code": code, "inputs": dict(inputs), "limits": limits}

    def _counts_processes(self) -> bool:
        """Whether the kernel counts processes by user namespace; older ones count all of this user's."""
        release = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
        return self.layer == "bubblewrap" and release >= [5, 14]

    async def _prepare(self) -> None:
        self._require_open()
        if self.layer:
            return
        async with self._testing:
            if not self.layer:
                self.layer = await _choose(self._settings)

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox is closed", cause="sandbox")

    async def _take(self, place: Place) -> Interpreter:
        interpreter = self._waiting(place) or await start(place)
        self._live.add(interpreter)
        return interpreter

    async def _put_away(self, interpreter: Interpreter) -> None:
        """Nothing writes in a working folder any more when its run is over. The next run of the kind is prepared."""
        self._in_background(interpreter.bury())
        if interpreter.place.folder is not None:
            interpreter.kill()
            await interpreter.exited()
        self._refill(interpreter.place)

    def _place(self, code: str, folder: Path | None, readable: Collection[Path], *, packages: bool) -> Place:
        assert self.layer
        modules = tuple(sorted(set(SLOW_IMPORTS.findall(code)))) if packages else ()
        own = folder.resolve() if folder else None
        seen = tuple(dict.fromkeys(str(path.resolve()) for path in readable))
        return Place(self.layer, own, self._settings.disk_mb << 20, packages, modules, seen)

    def _waiting(self, place: Place) -> Interpreter | None:
        for interpreter in [each for each in self._ready if each.fits(place)]:
            self._ready.remove(interpreter)
            if interpreter.alive:
                interpreter.take()
                return interpreter
            self._in_background(interpreter.bury())
        return None

    def _refill(self, place: Place) -> None:
        """Loaded packages take memory, so of these one waits; the plain ones are as many as there are runs at once.

        For a folder, whose next run may never come, only what takes long to load waits.
        """
        if place.layer == "none" or self._closed or (place.folder and not place.modules):
            return
        wanted = 1 if place.packages or place.folder else self._settings.parallel
        while sum(each.fits(place) for each in self._ready) + self._starting.count(place) < wanted:
            self._starting.append(place)
            self._in_background(self._start_one(place))

    async def _start_one(self, place: Place) -> None:
        """A failure here shows when the next run finds nothing waiting and starts its own."""
        try:
            with contextlib.suppress(SandboxError, OSError):
                self._ready.append(await start(place))
                while self._ready and (self._closed or len(self._ready) > 2 * self._settings.parallel):
                    await self._ready.popleft().bury()
        finally:
            self._starting.remove(place)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def probe(settings: params.Sandbox) -> list[Probe]:
    """Which layers hold on this machine, and for the others what is missing and how to get it."""
    found = []
    for layer in ISOLATING:
        try:
            isolates = await _self_test(layer, settings)
            weaker = f"; weaker than bubblewrap: {landlock.WEAKER}" if layer == "landlock" else ""
            found.append(Probe(layer, ok=True, explanation=isolates + weaker))
        except SetupError as error:
            found.append(Probe(layer, ok=False, explanation=str(error)))
    return [*found, Probe("none", ok=True, explanation="no isolation; only when sandbox.isolation says so")]


async def _choose(settings: params.Sandbox) -> Layer:
    """The layer that is asked for, or the first that holds.

    Raises:
        SetupError: none does; what is missing for each, and how to get it.
    """
    complaints = []
    for layer in ISOLATING:
        if settings.isolation in {"auto", layer}:
            try:
                await _self_test(layer, settings)
            except SetupError as error:
                complaints.append(f"{layer}: {error}")
            else:
                return layer
    raise SetupError(f"model-written code cannot be isolated. {'. '.join(complaints)}")


SELF_TEST = """
import os, resource, socket, harness
given = harness.inputs

def open_way(act, *arguments):
    try:
        act(*arguments)
    except (OSError, ValueError):
        return False
    return True

def connects(family, address):
    with socket.socket(getattr(socket, family)) as client:
        client.connect(tuple(address) if isinstance(address, list) else address)

def write(folder):
    os.mkdir(folder + "/gradeflow-self-test")
    os.rmdir(folder + "/gradeflow-self-test")

def limits(pid):
    resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE))

with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file.read().splitlines())
open_way(os.chmod, given["secret"], 0o666)  # the host looks at what that did
parent = os.getppid()  # 1 where processes have a namespace of their own
harness.result({
    "the host's files can be read": open_way(open, given["secret"]),
    "the host's folders can be listed": open_way(os.listdir, os.path.dirname(given["secret"])),
    "names of the host's files are in sight": os.path.exists(given["secret"]),
    "the system can be written": any(open_way(write, place) for place in ("", "/usr/lib")),
    "other processes are in sight": open_way(os.listdir, "/proc") and sum(map(str.isdigit, os.listdir("/proc"))) > 3,
    "other processes can be reached": parent > 1 and (open_way(os.kill, parent, 0) or open_way(limits, parent)),
    "the host's environment is in sight": not os.environ.keys().isdisjoint(given["names"]),
    "the host's sockets can be reached": any(open_way(connects, *door) for door in given["doors"]),
    "privileges are left": int(status["CapEff"], 16) or int(status["NoNewPrivs"]) != 1,
    "its user is root": os.getuid() == 0,
})
"""
_passed: set[str] = set()  # what this process has seen hold


async def _self_test(layer: Layer, settings: params.Sandbox) -> str:
    """Run code that looks for ways out; returns what isolates, in words.

    Raises:
        SetupError: naming what does not hold and how to mend it.
    """
    means = bubblewrap if layer == "bubblewrap" else landlock
    found: str = means.find()
    if found in _passed:
        return found
    trial = Sandbox(settings.model_copy(update={"isolation": layer, "parallel": 1}))
    trial.layer = layer
    names = sorted(set(os.environ) - set(bubblewrap.ENVIRONMENT) - {"LC_CTYPE", "PWD"})
    with _temptations() as (secret, doors):
        try:
            inputs = {"secret": str(secret), "doors": doors, "names": names}
            seen = await trial.run(SELF_TEST, inputs=inputs, wall_s=30)
        except SandboxError as error:
            said = " ".join(str(error).split())
            raise SetupError(f"{said}. {means.remedy(said)}") from None
        finally:
            await trial.close()
        changed = secret.stat().st_mode & 0o777 != 0o600
    open_ways = [way for way, is_open in (seen.value or {}).items() if is_open and way not in means.ACCEPTED]
    if seen.status != "ok" or open_ways or changed:
        said = seen.error or "; ".join(open_ways) or "the host's files can be changed"
        raise SetupError(f"{found} does not isolate: {said}")
    _passed.add(found)
    return found


@contextlib.contextmanager
def _temptations() -> Iterator[tuple[Path, list[tuple[str, Any]]]]:
    """A file of the host, and sockets of each kind that code could connect to."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradeflow-self-test-")))
        secret = folder / "secret"
        secret.touch(0o600)
        doors: list[tuple[str, Any]] = []
        abstract = f"\0gradeflow-self-test-{os.getpid()}-{folder.name}"
        for family, address in (("AF_INET", ("127.0.0.1", 0)), ("AF_UNIX", str(folder / "s")), ("AF_UNIX", abstract)):
            server = stack.enter_context(socket.socket(getattr(socket, family)))
            server.bind(address)
            server.listen()
            doors.append((family, server.getsockname() if family == "AF_INET" else address))
        yield secret, doors
