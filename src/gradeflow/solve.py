"""An agent solves modeling tasks: workspace -> agent <-> sandbox -> submission -> grade -> MLflow run.

One task is one run. Several tasks, or several seeds, are a run with one below it for each, and the same command goes on
where it was interrupted: what is finished is not solved again.
"""

import asyncio
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradeflow import agent, benchmarks, fingerprint, outcomes, prompt, readiness, registry, tracking
from gradeflow.attempt import Attempt, limits, solve_task
from gradeflow.benchmarks import Competition
from gradeflow.benchmarks.catalogue import Benchmark
from gradeflow.errors import FINAL, DataError, Fault, SettingsError, TooManyFaults
from gradeflow.llm import ChatClient, ScriptedClient, connect
from gradeflow.llm.named import named
from gradeflow.outcomes import Outcome
from gradeflow.params import Model, Params
from gradeflow.redact import redact
from gradeflow.results_file import ResultsFile, answers_of, row_of
from gradeflow.sandbox import Sandbox

SECTIONS = ("solve", "grade", "models", "sandbox")
BENCHMARK = "gradeflow.solve.benchmark"
MODEL = "gradeflow.solve.model"
UNREADABLE = "data"
"""Cause of a fault: files of a task are missing or not as expected."""
HOPELESS = 10
"""Tasks in a row without a score, for faults, after which no further one is begun."""

Replies = Mapping[str, Sequence[str]] | Sequence[str]
"""Of a script: those of each task, or the same for all."""


@dataclass(frozen=True, slots=True)
class Job:
    competition: Competition
    seed: int


def main(
    params: Params,
    *,
    task: Sequence[str] = (),
    scripted: str = "",
    dataset_file: str = "",
    llm_model: str = "",
    llm_provider: str = "",
) -> None:
    """Solve tasks. `scripted` names a JSON file with a list of replies that stand in for the model's."""
    name = params.solve.model
    asked = named(params.models[name], llm_model, llm_provider, os.environ)
    params = params.model_copy(update={"models": {**params.models, name: asked}})
    names = ",".join(name for name in task if name) or ("" if dataset_file else params.solve.task)
    chosen = {"task": names, "benchmark": benchmarks.canonical(params.solve.benchmark)}
    params = params.model_copy(update={"solve": params.solve.model_copy(update=chosen)})
    settings = params.solve
    replies = _replies(Path(scripted)) if scripted else None
    if replies is None:
        _require_server(settings.model, params.models[settings.model])
    with Benchmark(settings, params.sandbox, params.grade) as benchmark:
        ids = benchmark.chosen(settings.task, Path(dataset_file) if dataset_file else None)
        found, unreadable = _read(benchmark, ids)
        jobs = [Job(competition, seed) for seed in range(settings.seeds) for competition in found]
        _require_place(settings.log_path)
        tracking.connect(params.tracking, Path.cwd())
        several = len(jobs) + len(unreadable) > 1
        mark = fingerprint.of(params, SECTIONS, *ids, json.dumps(replies)) if several else None
        resume = tracking.find_unfinished("solve", mark) if mark else None
        tree = redact(params.model_dump(mode="json"))
        with tracking.start_run("solve", tree, resume=resume, fingerprint=mark, apart=several) as run:
            run.set_tags({BENCHMARK: settings.benchmark})
            registry.record_prompts(run, [prompt.load(name) for name in agent.PROMPTS])
            _Tasks(params, replies, run, several=several).solve(jobs, unreadable)


def _read(benchmark: Benchmark, ids: Sequence[str]) -> tuple[list[Competition], dict[str, Fault]]:
    """The tasks, and why others cannot be read; one alone that cannot be is an error."""
    found, unreadable = [], {}
    for name in ids:
        try:
            found.append(benchmark.competition(name))
        except DataError as error:
            if len(ids) == 1:
                raise
            unreadable[name] = Fault(str(error), cause=UNREADABLE)
    return found, unreadable


def summary(attempt: Attempt) -> str:
    """The outcome in one line."""
    report = attempt.report
    medals = [name for name in ("gold", "silver", "bronze") if getattr(report, f"{name}_medal")]
    if report.score is not None:
        said = f"score {report.score:g}" + "".join(f", {name} medal" for name in medals)
    else:
        said = "invalid submission" if report.submission_exists else "no submission"
    return f"{report.competition_id}: {said}, {attempt.episode.turns} turns -> {attempt.workspace.run_dir}"


class _Tasks:
    """Solves jobs side by side, and writes down each as soon as it is done."""

    def __init__(self, params: Params, replies: Replies | None, run: tracking.Run, *, several: bool) -> None:
        self._params = params
        self._settings = params.solve
        self._replies = replies
        self._run = run
        self._secrets = _secrets(params)
        self._results = ResultsFile(params.solve)
        self._faults: list[Fault] = []
        self._in_a_row = 0
        self._several = several
        self._preparing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )

    def solve(self, jobs: Sequence[Job], unreadable: Mapping[str, Fault]) -> None:
        """Solve what is not solved yet.

        Raises:
            Fault: a task has no score for a fault; the others are solved first.
        """
        for name, fault in unreadable.items():
            self._note(name, "", fault)
        done = outcomes.of_children(self._run.id) if self._several else []
        solved = {(one.task, one.seed) for one in done}
        left = [job for job in jobs if (job.competition.id, job.seed) not in solved]
        try:
            with self._progress:
                bar = self._progress.add_task("solve", total=len(jobs), completed=len(done))
                asyncio.run(self._solve(left, done, bar))
        finally:
            if self._several:
                self._report(done)
        self._require_scores(len(jobs) + len(unreadable))

    async def _solve(self, jobs: Sequence[Job], done: list[Outcome], bar: Any) -> None:
        await readiness.check(limits(self._params), {})  # the model is asked at once anyway
        sandbox = Sandbox(limits(self._params))
        model = None if self._replies is not None else connect(self._params.models[self._settings.model], None)
        slots = asyncio.Semaphore(self._settings.parallel)
        waiting = ThreadPoolExecutor(4 * self._settings.parallel)  # for the store, graders, files
        asyncio.get_running_loop().set_default_executor(waiting)

        async def one(job: Job) -> None:
            async with AsyncExitStack() as slot:
                await slot.enter_async_context(slots)
                self._require_hope()
                await self._attempt(job, sandbox, model or self._script(job), slot, done)
            self._progress.update(bar, advance=1, description=f"solve  {outcomes.so_far(done)}")

        tasks = [asyncio.ensure_future(one(job)) for job in jobs]
        try:
            await asyncio.gather(*tasks)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):  # gather has cancelled them: twice, runs stay open
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            await sandbox.close()
            if model is not None:
                await model.close()

    async def _attempt(
        self, job: Job, sandbox: Sandbox, client: ChatClient, slot: AsyncExitStack, done: list[Outcome]
    ) -> None:
        """Solve one task in a run of its own; it is `done` unless a fault left it without a score."""
        try:
            async with self._opened(job, client.model) as run:
                async with self._preparing[job.competition.id]:  # other seeds of the task want the same files
                    await asyncio.to_thread(job.competition.prepare)
                attempt = await solve_task(
                    job.competition,
                    client,
                    sandbox,
                    self._settings,
                    seed=job.seed,
                    snapshot=self._params.model_dump(mode="json"),
                    secrets=self._secrets,
                )
                self._write(run, attempt)
                done.append(outcomes.of_attempt(attempt, job.seed))
                self._results.add(row_of(attempt))
                await slot.aclose()  # another task's, while the store takes what was logged
        except (Fault, DataError) as error:
            fault = error if isinstance(error, Fault) else Fault(str(error), cause=UNREADABLE)
            self._note(job.competition.id, answers_of(job.competition), fault)
            self._in_a_row += 1
            if not self._several:
                raise
            return
        self._in_a_row = 0
        self._progress.console.print(summary(attempt), highlight=False, markup=False, soft_wrap=True)

    def _note(self, task: str, answers: str, fault: Fault) -> None:
        """A task that has no score for a fault."""
        row = {"competition_id": task, "answers_path": answers, "error_message": str(fault)}
        self._results.add(redact(row, self._secrets))
        self._faults.append(fault)
        if self._several:
            self._progress.console.print(f"{task}: no score: {fault}", highlight=False, markup=False)

    @asynccontextmanager
    async def _opened(self, job: Job, model: str) -> AsyncIterator[tracking.Run]:
        """The run of one task; of one alone it is the command's own. A store may be slow: it is asked in a thread."""
        tags = {outcomes.TASK: job.competition.id, outcomes.SEED: str(job.seed), MODEL: model}
        if not self._several:
            self._run.set_tags(tags)
            yield self._run
            return
        tree = {"solve": {"task": job.competition.id, "seed": job.seed, "model": model}}  # the rest is its parent's
        manager = tracking.start_run("solve_task", redact(tree), name=job.competition.id, parent=self._run, tags=tags)
        run = await asyncio.to_thread(manager.__enter__)
        try:
            yield run
        except BaseException as error:
            await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(manager.__exit__, None, None, None)

    def _write(self, run: tracking.Run, attempt: Attempt) -> None:
        run.log_metrics(outcomes.metrics(attempt))
        run.log_artifacts(attempt.workspace.artifacts, "artifacts")
        run.log_text(json.dumps(attempt.report.to_dict(), indent=2), "report.json")
        if attempt.submission:
            run.log_artifact(attempt.submission, "submission")
        run.log_rollout_trace(attempt.rollout(), 0, name="conversation", secrets=self._secrets)

    def _report(self, done: Sequence[Outcome]) -> None:
        if done:
            self._run.log_table("tasks.json", [one.to_row() for one in done])
            self._run.log_metrics(outcomes.summary(done))
            Console(highlight=False).print(outcomes.table(done))
        if self._results.path is not None:
            print(f"results: {self._results.path}")

    def _script(self, job: Job) -> ScriptedClient:
        replies = self._replies
        if isinstance(replies, Mapping):
            if job.competition.id not in replies:
                raise DataError(f"the script has no replies for {job.competition.id}")
            replies = replies[job.competition.id]
        return ScriptedClient(replies or [])

    def _require_hope(self) -> None:
        """Raises the last fault where no further try can mend it, or where nothing but faults has come of many."""
        if not self._faults:
            return
        last = self._faults[-1]
        if last.cause in FINAL:
            raise last
        if self._in_a_row >= HOPELESS:
            raise TooManyFaults(
                f"{self._in_a_row} tasks in a row have no score, the last because: {last}. The same command goes on "
                "with those that are left",
                cause=last.cause,
            )

    def _require_scores(self, count: int) -> None:
        if not self._faults:
            return
        last = self._faults[-1]
        final = all(one.cause in FINAL | {UNREADABLE} for one in self._faults)
        said = f"{len(self._faults)} of {count} tasks have no score, the last because: {last}."
        if final:
            raise TooManyFaults(f"{said} Mend that; the same command then tries these", cause=last.cause, status=1)
        raise TooManyFaults(f"{said} The same command tries these again", cause=last.cause)


def _require_server(name: str, model: Model) -> None:
    if model.url == "local":
        raise SettingsError(
            f"models.{name}.url is 'local': the embedded model cannot do modeling tasks. Name one that can: by "
            "--llm-model PROVIDER/NAME, by LLM_MODEL, API_BASE and API_KEY of the environment, or one of `models` in "
            "solve.model; or give replies that stand in for one (--scripted)"
        )


def _require_place(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SettingsError(f"solve.log_path: {folder} cannot be written: {error.strerror or error}") from None


def _replies(path: Path) -> Replies:
    try:
        replies = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    lists = list(replies.values()) if isinstance(replies, dict) else [replies]
    if not lists or not all(isinstance(own, list) and all(isinstance(one, str) for one in own) for own in lists):
        raise DataError(f"{path}: expected a list of texts, the replies in order, or such a list for each task's id")
    return replies  # type: ignore[no-any-return]


def _secrets(params: Params) -> Collection[str]:
    names = [model.api_key_env for model in params.models.values()]
    return [value for name in names if name and (value := os.environ.get(name))]
