"""Third-party graders and preparers: run in a sandbox of their own, out of the agent's reach and without the network.

A grader's process loads what graders need once, and does each grading in a child of its own: a grading costs
milliseconds, leaves nothing behind, and takes no other down with it. Where processes cannot have children (Landlock)
there is a process for each grading. A pickle that is submitted is read there, and only as data.
"""

import asyncio
import contextlib
import itertools
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gradeflow import params
from gradeflow.background import Background
from gradeflow.benchmarks import InvalidSubmissionError, leaks
from gradeflow.errors import DataError, GraderError, SandboxError
from gradeflow.sandbox import Sandbox

HERE = Path(__file__).parent
LASTING_S = 1e7  # a grader's process waits for work as long as its owner lives
ASSERTED = "AssertionError"
GRACE_S = 30  # of a process that has to be started first, and of a reply on its way

PROGRAM = """
import sys
import harness
import numpy
import pandas
try:
    {imports}
except ImportError:
    pass
sys.path.insert(0, harness.inputs["here"])
import inside
inside.main(harness)
"""


@dataclass(frozen=True, slots=True)
class Code:
    """Where a task's grader or preparer is: `function` as its config.yaml names it, in the task's folder.

    `package` is the folder of the tasks and the helpers they share; `imports` are modules that its graders are slow to
    import. With `exact` tables are read as MLE-bench reads them: numbers to the last bit, and an empty file as an empty
    table.
    """

    task: str
    function: str
    folder: Path
    package: Path
    imports: tuple[str, ...] = ()
    exact: bool = False


class ThirdParty:
    """Runs third-party code; used in `with`, which ends its processes."""

    def __init__(self, sandbox: params.Sandbox, limits: params.Grade) -> None:
        self._limits = limits
        wall_s = max(limits.wall_s, limits.prepare_s)
        update = {
            "memory_mb": limits.memory_mb,
            "disk_mb": limits.disk_mb,
            "wall_s": wall_s,
            "cpu_s": math.ceil(wall_s),
        }
        self._settings = sandbox.model_copy(update=update)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._jobs = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="gradeflow-grading-"))) / "jobs"
        self._jobs.mkdir(mode=0o755)
        self._numbers = itertools.count()
        self._sound: dict[Code, bool] = {}
        self._idle: dict[tuple[Path, tuple[str, ...]], list[_Process]] = {}
        self._background = self._open.enter_context(Background())
        self._sandbox = Sandbox(self._settings)
        self._turns = asyncio.Semaphore(self._settings.parallel)
        self._open.callback(lambda: self._background.run(self._close()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def grade(self, code: Code, submission: Path, answers: Path | None, *, gold: Path | None = None) -> float:
        """The grader's score of a submission.

        Many graders check submissions by `assert`. One that takes the gold submission is right to refuse another so.

        Raises:
            InvalidSubmissionError: the grader says so, or the file is none of its kind.
            GraderError: the grader crashed, took too long, or gave no finite number.
            DataError: there is no file with the answers.
        """
        if answers is not None and not answers.is_file():
            raise DataError(
                f"{answers}: no such file. `gradeflow prepare`, with the same --benchmark, --data-dir and "
                f"--task {code.task}, makes it from raw data, if the folder is the right one"
            )
        with self._lent(submission, answers) as (given, known):
            job = _job("grade", code, self._limits.wall_s) | {"submission": given, "answers": known}
            said = self._background.run(self._ask(code, job))
        match said:
            case {"score": float(score)}:
                return score
            case {"invalid": reason}:
                raise InvalidSubmissionError(str(reason))
            case {"no_number": found}:
                raise GraderError(f"{code.task}: its grader gave {found}", cause="grader_no_number")
            case {"timed_out": True}:
                message = f"{code.task}: its grader took more than {self._limits.wall_s:g} s; grade.wall_s is the limit"
                raise GraderError(message, cause="grader_timed_out")
        reason = str(said.get("crashed", "it answered nothing of use"))
        if reason.startswith(ASSERTED) and gold and gold != submission and self._takes(code, gold, answers):
            raise InvalidSubmissionError(reason)
        raise GraderError(f"{code.task}: its grader crashed: {reason}", cause="grader_crashed")

    def _takes(self, code: Code, gold: Path, answers: Path | None) -> bool:
        if code not in self._sound:
            try:
                self._sound[code] = gold.is_file() and math.isfinite(self.grade(code, gold, answers))
            except (GraderError, InvalidSubmissionError):
                self._sound[code] = False
        return self._sound[code]

    def prepare(self, code: Code, raw: Path, public: Path, private: Path, answers: Path) -> None:
        """Have a preparer make public and private files from raw ones, which it cannot change.

        `answers` is the file that the public ones must not tell.

        Raises:
            DataError: it failed, made anything but files and folders, or gives the answers away.
        """
        if not raw.is_dir():
            raise DataError(f"{raw}: no such folder; put the raw data of {code.task} there")
        with tempfile.TemporaryDirectory(prefix=".prepare-", dir=raw.parent) as folder:  # where there is room for it
            job = _job("prepare", code, self._limits.prepare_s)
            job |= {"raw": str(raw.resolve()), "public": "public", "private": "private"}
            said = self._background.run(self._ask_once(code, job, Path(folder), raw))
            if said:
                why = said.get("crashed", f"it took more than {self._limits.prepare_s:g} s (grade.prepare_s)")
                raise DataError(f"{code.task}: its preparer failed: {why}")
            made = Path(folder) / "made"
            for name in ("public", "private"):
                _take(Path(folder) / name, made / name)
            inside = answers.relative_to(private) if answers.is_relative_to(private) else Path(answers.name)
            leaks.strip(made / "public", made / "private" / inside)
            shutil.copytree(made / "private", private, dirs_exist_ok=True)
            (made / "public").rename(public)  # last and at once: what is there is whole

    @contextlib.contextmanager
    def _lent(self, *paths: Path | None) -> Iterator[list[str | None]]:
        """Copies of files where graders can read them, each in a folder of its own, while it lasts."""
        folder = self._jobs / str(next(self._numbers))
        folder.mkdir()
        try:
            yield [str(_lend(path, folder / str(number))) if path else None for number, path in enumerate(paths)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _ask(self, code: Code, job: Mapping[str, Any]) -> dict[str, Any]:
        idle = self._idle.setdefault((code.package, code.imports), [])
        async with self._turns:
            process = idle.pop() if idle else _Process(self._sandbox, code, self._jobs)
            said = await process.ask(job)
            if process.alive:
                idle.append(process)
            return said

    async def _ask_once(self, code: Code, job: Mapping[str, Any], folder: Path, raw: Path) -> dict[str, Any]:
        process = _Process(self._sandbox, code, raw, folder=folder)
        try:
            return await process.ask(job)
        finally:
            await process.end()

    async def _close(self) -> None:
        for process in itertools.chain.from_iterable(self._idle.values()):
            await process.end()
        await self._sandbox.close()


class _Process:
    """A run of inside.main, which does one job after another."""

    def __init__(self, sandbox: Sandbox, code: Code, *readable: Path, folder: Path | None = None) -> None:
        self._jobs: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._last = False
        lines = "\n    ".join(f"import {name}" for name in code.imports) or "pass"
        self._run = asyncio.create_task(
            sandbox.run(
                PROGRAM.format(imports=lines),
                inputs={"here": str(HERE)},
                handler=self._answer,
                wall_s=LASTING_S,
                packages=True,
                folder=folder,
                readable=(HERE, code.package, *readable),
            )
        )

    @property
    def alive(self) -> bool:
        return not self._last and not self._run.done()

    async def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """What the code inside says of a job; it is third-party code's word.

        Raises:
            SandboxError: the sandbox broke.
        """
        self._reply = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(job)
        try:
            async with asyncio.timeout(job["wall_s"] + GRACE_S):
                awaited: set[asyncio.Future[Any]] = {self._reply, self._run}
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.end()
            return {"timed_out": True}
        except asyncio.CancelledError:
            await self.end()
            raise
        if self._reply.done():
            return self._reply.result()
        ended = self._run.result()
        return {"crashed": ended.error or "its process ended"}

    async def end(self) -> None:
        self._last = True
        self._run.cancel()
        with contextlib.suppress(asyncio.CancelledError, SandboxError):
            await self._run

    async def _answer(self, _name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        said = arguments.get("said")
        if isinstance(said, dict) and self._reply is not None and not self._reply.done():
            self._last = bool(said.pop("last", False))
            self._reply.set_result(said)
        return None if self._last else await self._jobs.get()


def _job(kind: str, code: Code, wall_s: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "function": code.function,
        "folder": str(code.folder.resolve()),
        "exact": code.exact,
        "wall_s": wall_s,
    }


def _lend(path: Path, folder: Path) -> Path:
    """Copy a file; graders run as another user, who must be able to read it."""
    folder.mkdir()
    copy = Path(shutil.copyfile(path, folder / path.name))
    for made, mode in ((folder.parent, 0o755), (folder, 0o755), (copy, 0o644)):
        made.chmod(mode)
    return copy


def _take(made: Path, wanted: Path) -> None:
    """Copy what a preparer made, plain files only, to a folder that it does not know."""
    if made.is_symlink() or not made.is_dir():
        raise DataError(f"{made.name}: a preparer may fill this folder, and not replace it")
    for place, folders, files in os.walk(made):
        target = wanted / Path(place).relative_to(made)
        target.mkdir(parents=True, exist_ok=True)
        for name in [*folders, *files]:
            found = Path(place) / name
            mode = found.lstat().st_mode
            if stat.S_ISREG(mode):
                shutil.copyfile(found, target / name)
            elif not stat.S_ISDIR(mode):
                raise DataError(f"{found.relative_to(made.parent)}: a preparer may make plain files and folders only")
