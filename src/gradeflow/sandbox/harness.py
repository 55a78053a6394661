"""The inside of the sandbox: an isolated interpreter runs this program, and it the code of one job.

Standard library only; the host never imports it. It speaks newline-delimited JSON over the descriptor it
is given: one job comes in, then replies; `started`, `call`, `result` and `ended` go out. The code can forge
every message, so the host believes none: a forged one can only spoil the run that sent it.
"""

# ruff: noqa: BLE001 - whatever the code raises is its ending
# ruff: noqa: FBT003, PTH109, PTH123, SLF001 - each start pays for what is imported here, so few modules are

from __future__ import annotations

import _thread
import builtins
import errno
import os
import resource
import sys
from _json import encode_basestring, make_encoder, make_scanner
from os import _exit, getpid, read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    Message = dict[str, Any]

FILENAME = "script.py"
NOBODY = 65534
TOP_LEVEL_AWAIT = 0x2000
RESERVE = 32 << 20  # address space that is left for reporting a MemoryError


class OutputLimitError(Exception):
    """A result or an argument is larger than the sandbox hands over."""


class Reading:
    """What `json` tells its scanner: that module's own half in Python takes as long to import as Python to start."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_int, parse_float, parse_constant = int, float, float


scan = make_scanner(Reading)  # type: ignore[arg-type]  # typeshed takes the class for its argument


def loads(text: str) -> Any:
    return scan(text, 0)[0]


def dumps(message: Message) -> str:
    encode = make_encoder({}, refuse, encode_basestring, None, ": ", ", ", False, False, False)
    return "".join(encode(message, 0))


def refuse(value: Any) -> Any:
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def leave_root() -> None:
    """Give up root for good: in a user namespace that maps it, root would not count against RLIMIT_NPROC."""
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError:  # read-only in some containers
        pass
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def set_limits(limits: dict[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu"], limits["cpu"] + 1))  # SIGXCPU, then SIGKILL
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"] + RESERVE))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"], limits["file"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits["files"], limits["files"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits["processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))


class Channel:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.owner = getpid()
        self.rest = b""
        self.number = 0
        self.replies: dict[int, Message] = {}
        self.futures: dict[int, tuple[Any, Any]] = {}
        self.writing = _thread.allocate_lock()
        self.reading = _thread.allocate_lock()
        self.limit = 0
        self.uses_asyncio = False

    def send(self, message: Message) -> None:
        if getpid() != self.owner:
            raise RuntimeError("the harness answers to the first process only")
        line = dumps(message).encode("utf-8", "replace") + b"\n"
        if self.limit and len(line) > self.limit:
            raise OutputLimitError(f"{message['kind']} of {len(line)} bytes; at most {self.limit} are handed over")
        with self.writing:
            while line:
                line = line[write(self.descriptor, line) :]

    def receive(self) -> list[bytes]:
        chunk = read(self.descriptor, 1 << 20)
        if not chunk:
            _exit(0)  # the host is gone
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        return lines

    def first(self) -> Message:
        while True:
            if lines := self.receive():
                self.uses_asyncio = b"asyncio" in lines[0]
                job: Message = loads(lines[0].decode())
                return job

    def pump(self) -> None:
        for line in self.receive():
            reply = loads(line.decode())
            loop, future = self.futures.pop(reply["id"], (None, None))
            if future is None:
                self.replies[reply["id"]] = reply
            else:
                loop.call_soon_threadsafe(settle, future, reply)

    def ask(self, name: str, arguments: Message, register: tuple[Any, Any] | None = None) -> int:
        with self.writing:
            self.number += 1
            number = self.number
        if register is not None:
            self.futures[number] = register
        self.send({"kind": "call", "id": number, "name": name, "arguments": arguments})
        return number

    def wait(self, number: int) -> Any:
        while True:
            with self.reading:
                if number in self.replies:
                    return opened(self.replies.pop(number))
                self.pump()

    def on_readable(self) -> None:
        """Called by asyncio; another thread may be reading, and may have taken what was there."""
        import select

        if self.reading.acquire(False):
            try:
                if select.select([self.descriptor], [], [], 0)[0]:
                    self.pump()
            finally:
                self.reading.release()


def opened(reply: Message) -> Any:
    if "error" in reply:
        raise RuntimeError(reply["error"])
    return reply["value"]


def settle(future: Any, reply: Message) -> None:
    if not future.done():
        future.set_result(reply)


class Pending:
    """Awaited where no event loop runs: `drive` waits for the reply."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __await__(self) -> Generator[Pending, Any, Any]:
        return (yield self)


def running_loop() -> Any:
    asyncio = sys.modules.get("asyncio")
    return asyncio._get_running_loop() if asyncio and hasattr(asyncio, "_get_running_loop") else None


def harness_module(channel: Channel, inputs: Message) -> Any:
    def result(value: Any) -> None:
        """Hand a JSON value to the host; the last one counts."""
        channel.send({"kind": "result", "value": value})

    def call(name: str, /, **arguments: Any) -> Any:
        """Ask the host and wait for its answer; RuntimeError when it refuses."""
        return channel.wait(channel.ask(name, arguments))

    async def acall(name: str, /, **arguments: Any) -> Any:
        """The same, concurrent under asyncio.gather."""
        loop = running_loop()
        if loop is None:
            return await Pending(channel.ask(name, arguments))
        future = loop.create_future()
        loop.add_reader(channel.descriptor, channel.on_readable)
        channel.ask(name, arguments, (loop, future))
        return opened(await future)

    def drive(coroutine: Any) -> Any:
        """Run a coroutine to its end, without importing asyncio where the job does not name it."""
        if channel.uses_asyncio or "asyncio" in sys.modules:
            import asyncio

            return asyncio.run(coroutine)
        step, sent = coroutine.send, None
        while True:
            try:
                pending = step(sent)
            except StopIteration as end:
                return end.value
            try:
                step, sent = coroutine.send, channel.wait(pending.number)
            except RuntimeError as error:
                step, sent = coroutine.throw, error

    module = type(sys)("harness")
    module.__dict__.update(inputs=inputs, result=result, call=call, acall=acall, drive=drive)
    return module


def execute(source: str, harness: Any) -> None:
    main = type(sys)("__main__")
    main.__dict__.update(__builtins__=builtins, __file__=FILENAME)
    sys.modules["__main__"] = main
    sys.modules["harness"] = harness
    sys.argv = [FILENAME]
    code = compile(source, FILENAME, "exec", flags=TOP_LEVEL_AWAIT, dont_inherit=True)
    coroutine = eval(code, main.__dict__)  # noqa: S307 - what this program is for
    if coroutine is not None:
        harness.drive(coroutine)


def finish() -> None:
    """What an interpreter does at its end."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    import atexit

    atexit._run_exitfuncs()


def limit_behind(error: BaseException) -> tuple[str, str] | None:
    """The limit that an exception tells of, with its name in words."""
    number = getattr(error, "errno", None)
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        return "memory", "out of memory"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "disk", "no space left in the working folder"
    if number == errno.EFBIG:
        return "disk", "the file is larger than allowed"
    if number == errno.EMFILE:
        return "files", "too many open files"
    if isinstance(error, BlockingIOError) and number == errno.EAGAIN and getattr(error, "filename", None) is None:
        return "processes", "too many processes or threads"
    if isinstance(error, RuntimeError) and error.args == ("can't start new thread",):
        return ("memory", "out of memory") if no_room_for_a_stack() else ("processes", "too many processes or threads")
    if isinstance(error, OutputLimitError):
        return "output", text_of(error)
    return None


def no_room_for_a_stack() -> bool:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    return used + (16 << 20) > resource.getrlimit(resource.RLIMIT_AS)[0]


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return ""


def line_of(error: BaseException) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == FILENAME:
        return error.lineno
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == FILENAME:
            line = step.tb_lineno
        step = step.tb_next
    return line


def ending_of(error: BaseException, source: str) -> Message:
    if isinstance(error, SystemExit):
        if not error.code:
            return {"status": "ok"}
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        message, line = f"exit status {error.code}", line_of(error)
        return {"status": "failed", "error_type": "SystemExit", "error": placed(message, line)}
    line = line_of(error)
    if isinstance(error, MemoryError):
        error.__traceback__ = None
        limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found = limit_behind(error)
    if found is not None:
        return {"status": "limit", "limit": found[0], "error": placed(found[1], line)}
    message = error.msg if isinstance(error, SyntaxError) else text_of(error)
    print_traceback(error, source)
    return {"status": "failed", "error_type": type(error).__name__, "error": placed(str(message), line)}


def placed(message: str, line: int | None) -> str:
    message = message if len(message) <= 2000 else message[:2000] + " ..."
    return message if line is None else f"line {line}: {message}"


def print_traceback(error: BaseException, source: str) -> None:
    import linecache
    import traceback

    linecache.cache[FILENAME] = (len(source), None, source.splitlines(True), FILENAME)
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != FILENAME:
        step = step.tb_next
    traceback.print_exception(type(error), error, step)


def end_of(source: str, harness: Any) -> Message:
    try:
        try:
            execute(source, harness)
        finally:
            finish()
    except BaseException as error:
        try:
            return ending_of(error, source)
        except BaseException:
            return {"status": "failed", "error_type": type(error).__name__, "error": ""}
    return {"status": "ok"}


def load(modules: list[str]) -> None:
    """Import what the job is likely to; what fails here fails again where the job can see it."""
    for name in modules:
        try:
            __import__(name)
        except Exception:  # noqa: S112
            continue


def main() -> None:
    descriptor = int(sys.argv[1])
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 1 << 10)
    if sys.argv[2] == "leave-root":
        leave_root()
    os.chdir(os.environ["HOME"])
    paths, modules = loads(sys.argv[4])
    sys.path += paths
    load(modules)
    channel = Channel(descriptor)
    job = channel.first()
    os.set_inheritable(descriptor, False)
    sys.path[:0] = [os.getcwd()]
    set_limits(job["limits"])
    channel.send({"kind": "started"})
    channel.limit = job["limits"]["output"]
    ending = end_of(job["code"], harness_module(channel, job["inputs"]))
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:  # noqa: S112 - the code may have put anything there
            continue
    if getpid() == channel.owner:
        channel.limit = 0
        channel.send({"kind": "ended", **ending})
        while read(descriptor, 1 << 16):  # the host ends this process, and sees to what it leaves
            pass
    _exit(0)


main()
