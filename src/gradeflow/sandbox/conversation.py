"""What the host and one interpreter say, from the job to its end. The host believes no message."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from gradeflow.errors import Fault, SandboxError
from gradeflow.sandbox.interpreter import Interpreter
from gradeflow.sandbox.output import tree_size, unlinked_size

Handler = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
Limit = Literal["wall", "cpu", "memory", "processes", "disk", "files", "output"]
CALLS_AT_ONCE = 256
MOST_UNREAD = 64 << 20  # bytes of replies that wait for code to read them
FLOOD = 64  # times the kept output; a run that writes more is stopped
DISK_CHECK_S = 0.25
THREAD_CHECK_S = 0.05
START_S = 60  # an interpreter that has not taken its job by then is broken


@dataclass(frozen=True, slots=True)
class Ending:
    status: Literal["ok", "failed", "limit"]
    error_type: str | None = None
    error: str = ""
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the host watches over; the rest of the limits is set inside."""

    wall_s: float
    cpu_s: float
    disk_bytes: int
    output_bytes: int
    processes: int


class ForgedMessageError(ValueError):
    """Something came over the channel that the harness does not say."""


def _refuse_constant(name: str) -> None:
    raise ForgedMessageError(f"{name} is not JSON")


def parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ForgedMessageError(f"not a line of JSON: {error}") from None
    if not isinstance(message, dict):
        raise ForgedMessageError("not a JSON object")
    return message


def parse_ending(message: Mapping[str, Any]) -> Ending:
    match message:
        case {"status": "ok"}:
            return Ending("ok")
        case {"status": "failed", "error_type": str(error_type), "error": str(error)}:
            return Ending("failed", error_type[:200], error[:4000])
        case {"status": "limit", "limit": limit, "error": str(error)} if limit in get_args(Limit):
            return Ending("limit", None, error[:4000], limit)
    raise ForgedMessageError("an ending of no known form")


def died(status: int, seconds: float, bounds: Bounds) -> Ending:
    """The ending of code whose process stopped before the harness could tell."""
    number = status - 128
    if number == signal.SIGXCPU or (number == signal.SIGKILL and seconds >= bounds.cpu_s):
        return Ending("limit", None, "more CPU time than allowed", "cpu")
    if number == signal.SIGXFSZ:
        return Ending("limit", None, "a file larger than allowed", "disk")
    if number > 0:
        with contextlib.suppress(ValueError):
            return Ending("failed", "Killed", f"ended by {signal.Signals(number).name}")
    return Ending("failed", "Exited", f"the process ended with status {status} before the code had finished")


class Capture:
    """The head of what a pipe brings; the rest is read and dropped."""

    def __init__(self, pipe: IO[bytes], keep: int, flooded: Callable[[], None]) -> None:
        self._descriptor = pipe.fileno()
        self._keep = keep
        self._flooded = flooded
        self._head = bytearray()
        self._seen = 0
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._descriptor, False)
        self._loop.add_reader(self._descriptor, self._read)

    def text(self) -> str:
        note = f"\n[cut at {self._keep} bytes]" if self._seen > self._keep else ""
        return self._head.decode("utf-8", "replace") + note

    def close(self) -> None:
        """Take what is still in the pipe, then stop reading."""
        while self._seen <= self._keep * FLOOD and self._read():
            pass
        self._loop.remove_reader(self._descriptor)

    def _read(self) -> bool:
        try:
            chunk = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._descriptor)
            return False
        self._head += chunk[: max(0, self._keep - self._seen)]
        self._seen += len(chunk)
        if self._seen > self._keep * FLOOD:
            self._flooded()
        return True


class Conversation:
    def __init__(self, interpreter: Interpreter, bounds: Bounds, handler: Handler | None) -> None:
        self._interpreter = interpreter
        self._bounds = bounds
        self._handler = handler
        self._calls: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._began: float | None = None
        self._stopped: Ending | None = None
        self._fault: Fault | None = None
        self.value: Any = None
        self.stdout = ""
        self.stderr = ""
        self.seconds = 0.0

    async def hold(self, job: Mapping[str, Any]) -> Ending:
        """Hand over the job, answer its calls, and return how it ended.

        Raises:
            SandboxError: the sandbox broke, and not the code.
            Fault: what the handler raised.
        """
        interpreter, keep = self._interpreter, self._bounds.output_bytes
        reader, self._writer = await asyncio.open_unix_connection(sock=interpreter.channel, limit=2 * keep + 8192)
        captures = [Capture(pipe, keep, self._flood) for pipe in (interpreter.stdout, interpreter.stderr)]
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(START_S, self._stop, Ending("failed"))
        watch = [self._loop.create_task(self._watch_disk(folder)) for folder in [interpreter.folder] if folder]
        if interpreter.place.layer == "landlock":
            watch.append(self._loop.create_task(self._watch_threads()))
        try:
            self._say(job)
            ending = await self._listen(reader)
            self.seconds = self._loop.time() - (self._began or self._loop.time())
        finally:
            self._timer.cancel()
            interpreter.kill()
            await _cancel([*self._calls, *watch])
            for capture in captures:
                capture.close()
            self.stdout, self.stderr = (capture.text() for capture in captures)
            self._writer.transport.abort()
        return self._judge(ending)

    async def _listen(self, reader: asyncio.StreamReader) -> Ending | None:
        """Until the code ends or is stopped; None when neither it nor its process tells an ending."""
        try:
            while (line := await reader.readline()).endswith(b"\n") and self._stopped is None:
                if (ending := self._take(parse(line))) is not None:
                    return await self._within_disk(ending)
        except ValueError as error:  # readline's, when a line has no end
            return Ending("failed", "ProtocolError", f"the code wrote to the harness's channel: {error}")
        except ConnectionError:
            pass
        if self._stopped is not None:
            return None
        status = await self._interpreter.exited()
        return died(status, self._loop.time() - (self._began or 0), self._bounds) if status >= 0 else None

    def _judge(self, ending: Ending | None) -> Ending:
        if self._fault is not None:
            raise self._fault
        ending = self._stopped or ending
        if self._began is None or ending is None:
            said = self.stderr.strip()[-1000:] or "it was ended from outside"
            raise SandboxError(f"an isolated interpreter broke: {said}", cause="sandbox")
        return ending

    def _take(self, message: Mapping[str, Any]) -> Ending | None:
        match message:
            case {"kind": "started"} if self._began is None:
                self._start_clock()
            case {"kind": "result", "value": value}:
                self.value = value
            case {"kind": "call", "id": int(number), "name": str(name), "arguments": dict(arguments)}:
                if len(self._calls) >= CALLS_AT_ONCE:
                    raise ForgedMessageError(f"more than {CALLS_AT_ONCE} calls at once")
                if self._writer.transport.get_write_buffer_size() > MOST_UNREAD:
                    raise ForgedMessageError(f"more than {MOST_UNREAD} bytes of replies are not read")
                task = self._loop.create_task(self._answer(number, name, arguments))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case {"kind": "ended"}:
                return parse_ending(message)
            case _:
                raise ForgedMessageError("a message of no known kind")
        return None

    def _start_clock(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._began = self._loop.time()
        wall_s = self._bounds.wall_s
        out_of_time = Ending("limit", None, f"more than {wall_s:g} s of wall time", "wall")
        self._timer = self._loop.call_later(wall_s, self._stop, out_of_time)

    async def _answer(self, number: int, name: str, arguments: Mapping[str, Any]) -> None:
        try:
            if self._handler is None:
                raise LookupError("nothing answers calls in this run")
            self._say({"id": number, "value": await self._handler(name, arguments)})
        except Fault as fault:
            self._fault = self._fault or fault
            self._stop(Ending("failed"))
        except Exception as error:  # noqa: BLE001 - whatever refuses a call is told to the code that made it
            self._say({"id": number, "error": str(error)})

    def _say(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _stop(self, ending: Ending) -> None:
        """End the run from the host's side; the first reason counts."""
        self._stopped = self._stopped or ending
        self._interpreter.kill()
        self._writer.transport.abort()

    def _flood(self) -> None:
        most = self._bounds.output_bytes * FLOOD
        self._stop(Ending("limit", None, f"more than {most} bytes of output", "output"))

    async def _watch_disk(self, folder: Path) -> None:
        while await asyncio.to_thread(self._taken, folder) <= self._bounds.disk_bytes:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(DISK_CHECK_S)
        self._stop(self._full())

    async def _watch_threads(self) -> None:
        """Where the kernel does not count them by sandbox, too many live for one check."""
        while self._interpreter.threads() <= self._bounds.processes:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(THREAD_CHECK_S)
        self._stop(Ending("limit", None, "too many processes or threads", "processes"))

    async def _within_disk(self, ending: Ending) -> Ending:
        folder = self._interpreter.folder
        if folder is None or await asyncio.to_thread(self._taken, folder) <= self._bounds.disk_bytes:
            return ending
        return self._full()

    def _taken(self, folder: Path) -> int:
        return tree_size(folder) + unlinked_size(self._interpreter.processes(), folder)

    def _full(self) -> Ending:
        return Ending("limit", None, f"a working folder of more than {self._bounds.disk_bytes} bytes", "disk")


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
