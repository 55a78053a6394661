"""An isolated interpreter: started, given one job, thrown away with its processes, pipes and folder."""

import asyncio
import contextlib
import functools
import json
import marshal
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradeflow.errors import SandboxError
from gradeflow.sandbox import bubblewrap, landlock, seccomp
from gradeflow.sandbox.output import names

Layer = Literal["bubblewrap", "landlock", "none"]
Root = Literal["stay", "leave-root"]
HARNESS = Path(__file__).with_name("harness.py")
ENTER = "import marshal, os, sys; exec(marshal.loads(os.read(int(sys.argv[1]), int(sys.argv[3]))))"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an interpreter works: the caller's folder or, with None, a private one that vanishes with it.

    `modules` are imported before the job comes; `readable` are paths of the host that it may read beside the system's.
    """

    layer: Layer
    folder: Path | None
    disk_bytes: int
    packages: bool
    modules: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()


class Interpreter:
    def __init__(
        self, place: Place, process: subprocess.Popen[bytes], channel: socket.socket, scratch: Path | None
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.place = place
        self.process = process
        self.channel = channel
        self.stdout = process.stdout
        self.stderr = process.stderr
        self.first: int | None = None  # a pidfd of the first process inside: with it, everything inside ends
        self.inside: Path | None = None  # /proc as the code sees it
        self._scratch = scratch
        self._folder = _identity(place.folder)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def folder(self) -> Path | None:
        """Where on the host it works; None where no folder of the host is in it."""
        return self.place.folder or self._scratch

    def fits(self, place: Place) -> bool:
        """Whether it works there; a folder that was made anew under the same name is another."""
        return self.place == place and self._folder == _identity(place.folder)

    def take(self) -> None:
        """What came into its folder while it waited is for the code too."""
        if self.place.layer == "bubblewrap" and self.place.folder is not None and bubblewrap.leaves_root():
            bubblewrap.hand_over(self.place.folder)

    def processes(self) -> list[Path]:
        """All that run inside; without a /proc of its own, the first alone."""
        if self.inside is None:
            return [Path(f"/proc/{self.process.pid}")]
        return [self.inside / name for name in names(self.inside) if name.isdigit()]

    def threads(self) -> int:
        """How many the process that was started has; none once it has ended."""
        try:
            return sum(1 for _ in Path(f"/proc/{self.process.pid}/task").iterdir())
        except OSError:
            return 0

    def kill(self) -> None:
        """End it and all it started; without isolation, what has left its session escapes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.first is not None:
                signal.pidfd_send_signal(self.first, signal.SIGKILL)
            elif self.place.layer == "none":
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()

    async def exited(self) -> int:
        """Its exit status as a shell gives it: 128 and the signal's number when a signal ended the code."""
        while (status := self.process.poll()) is None:  # noqa: ASYNC110 - a process is no event
            await asyncio.sleep(0.002)
        return 128 - status if status < 0 and self.place.layer != "bubblewrap" else status

    async def bury(self) -> None:
        self.kill()
        await self.exited()
        for end in (self.channel, self.stdout, self.stderr):
            end.close()
        if self.first is not None:
            os.close(self.first)
            self.first = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _identity(folder: Path | None) -> tuple[int, int] | None:
    if folder is None or not folder.exists():
        return None
    found = folder.stat()
    return found.st_dev, found.st_ino


async def start(place: Place) -> Interpreter:
    """Start an interpreter that waits for its job.

    Raises:
        SandboxError: when it cannot be started.
    """
    if place.layer == "bubblewrap":
        return await _start_isolated(place)
    folder = place.folder or Path(tempfile.mkdtemp(prefix="gradeflow-sandbox-"))
    command: list[str] = []
    if place.layer == "landlock":
        command = landlock.arguments(folder=folder, with_packages=place.packages, readable=place.readable)
    return _spawn(place, command, "stay", cwd=folder, scratch=None if place.folder else folder)


async def _start_isolated(place: Place) -> Interpreter:
    """Start bubblewrap; for root it waits in its user namespace until this process has mapped the users."""
    leaves_root = bubblewrap.leaves_root()
    if leaves_root and place.folder is not None:
        bubblewrap.hand_over(place.folder)
    command = bubblewrap.arguments(
        folder=place.folder,
        disk_bytes=place.disk_bytes,
        with_packages=place.packages,
        readable=place.readable,
    )
    program = seccomp.program()
    info, info_end = os.pipe()
    gate_end, gate = os.pipe()
    filter_end, filter_in = os.pipe()
    os.write(filter_in, program)
    os.close(filter_in)
    try:
        command[1:1] = ["--info-fd", str(info_end), "--seccomp", str(filter_end)]
        command[1:1] = ["--userns-block-fd", str(gate_end)] if leaves_root else []
        try:
            root: Root = "leave-root" if leaves_root else "stay"
            interpreter = _spawn(place, command, root, inherited=(info_end, gate_end, filter_end))
        finally:
            for end in (info_end, gate_end, filter_end):
                os.close(end)
        await _let_in(interpreter, info, gate, leaves_root=leaves_root)
    finally:
        os.close(info)
        os.close(gate)
    return interpreter


async def _let_in(interpreter: Interpreter, info: int, gate: int, *, leaves_root: bool) -> None:
    try:
        pid = await _meet_first(interpreter, info)
        if leaves_root:
            bubblewrap.map_users(pid)
            os.write(gate, b"1")
    except (OSError, ValueError) as error:
        interpreter.kill()
        await interpreter.exited()
        said = interpreter.stderr.read().decode(errors="replace").strip() or str(error)
        await interpreter.bury()
        raise SandboxError(f"an isolated interpreter did not start: {said}", cause="sandbox") from None
    except BaseException:
        await interpreter.bury()
        raise


async def _meet_first(interpreter: Interpreter, info: int) -> int:
    """Learn of the first process inside, even when cancelled: without bubblewrap it would wait for ever."""
    told = b""
    readable = asyncio.Event()
    asyncio.get_running_loop().add_reader(info, readable.set)
    try:
        await readable.wait()
    finally:
        asyncio.get_running_loop().remove_reader(info)
        while b"}" not in told and (chunk := os.read(info, 4096)):
            told += chunk
        pid = int(json.loads(told or b"{}").get("child-pid", 0))
        interpreter.first = os.pidfd_open(pid) if pid else None
    if not pid:
        raise ValueError("bubblewrap ended before it had told its process")
    interpreter.inside = Path(f"/proc/{pid}") / "root" / "proc"
    return pid


@functools.cache
def _harness() -> bytes:
    """The compiled harness: the interpreter inside is this one, and each start would pay for compiling it."""
    return marshal.dumps(compile(HARNESS.read_text(encoding="utf-8"), "harness.py", "exec"))


def _spawn(
    place: Place,
    command: list[str],
    root: Root,
    *,
    cwd: Path | None = None,
    scratch: Path | None = None,
    inherited: tuple[int, ...] = (),
) -> Interpreter:
    ours, theirs = socket.socketpair()
    harness = _harness()
    ours.sendall(harness)
    run_it = [
        bubblewrap.python(),
        *bubblewrap.PYTHON_FLAGS,
        "-c",
        ENTER,
        str(theirs.fileno()),
        root,
        str(len(harness)),
        json.dumps([bubblewrap.packages() if place.packages else [], place.modules]),
    ]
    bubblewrapped = place.layer == "bubblewrap"
    environment = {} if bubblewrapped else bubblewrap.ENVIRONMENT | {"HOME": str(cwd), "TMPDIR": str(cwd)}
    try:
        process = subprocess.Popen(
            [*command, *run_it],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd or "/",
            env=environment,
            pass_fds=(theirs.fileno(), *inherited),
            start_new_session=not bubblewrapped,
        )
    except OSError as error:
        ours.close()
        raise SandboxError(f"an isolated interpreter did not start: {error}", cause="sandbox") from error
    finally:
        theirs.close()
    return Interpreter(place, process, ours, scratch)
