"""What runs in the image: the original's variables -> a plan -> the worker -> OUTPUT_DIR/results.json, if all is there.

Each task's results lie in OUTPUT_DIR/.gradeflow, by base, adapter and settings: what is done when time runs out is not
done again. No variable is ever read as a command. Ends with status 0 for whole results alone.
"""

import argparse
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from gradeflow import adapter as adapters
from gradeflow import digest, disk, fingerprint, jsonl, models, params
from gradeflow.errors import EvaluationError, GradeflowError, SettingsError, SetupError
from gradeflow.evaluation import preflight, process, results, tasks, worker
from gradeflow.evaluation.original import CONTEXT, NO_ADAPTER, Container, offline
from gradeflow.evaluation.plan import BASE, Plan, Subject

OF_THE_FOLDER = disk.FULL | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
KEPT = ".gradeflow"

Run = Callable[[Plan], None]


class Catalogue(Protocol):
    """What is known of tasks; `gradeflow.evaluation.tasks` knows lm-eval's."""

    def resolve(self, names: Sequence[str], include: Sequence[str]) -> list[str]: ...

    def contents(self, names: Sequence[str], settings: params.Evaluate) -> str: ...

    def known(self, settings: params.Evaluate) -> preflight.Tasks: ...


def main(argv: Sequence[str] | None = None, *, catalogue: Catalogue = tasks, run: Run = worker.run) -> int:
    """Evaluate as the environment says; returns the exit status. The last line says how it ended."""
    parser = argparse.ArgumentParser(prog="gradeflow-evaluate", description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings that no variable is for")
    file = parser.parse_args(argv).params
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        container = Container.read(os.environ)
        os.environ.update(hub_folders(container, os.environ))
        settings = params.load(file, container.overrides())
        written = evaluate(container, settings, catalogue, run)
    except GradeflowError as error:
        return _failed(str(error), getattr(error, "status", 1))
    except OSError as error:
        if error.errno not in OF_THE_FOLDER:
            raise
        return _failed(f"{error.filename}: {disk.said(error)}; is it writable for user {os.getuid()}?", 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"gradeflow: done: {', '.join(container.benchmark_tasks)}: {written}", flush=True)
    return 0


def hub_folders(container: Container, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep all that comes from the hub, models too, with the datasets; offline, for all libraries."""
    datasets = str(container.hf_datasets_cache.absolute())
    found = {"HF_HOME": environment.get("HF_HOME") or datasets, "HF_DATASETS_CACHE": datasets}
    if offline(environment):
        found |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    return found


def evaluate(container: Container, settings: params.Params, catalogue: Catalogue, run: Run) -> Path:
    """Measure what is not measured yet, and write results.json, samples and lm-eval's own files into OUTPUT_DIR.

    Raises:
        EvaluationError: a task has no results; which ones have is said, and an earlier results.json is gone.
    """
    out = container.output_dir.absolute()
    out.mkdir(parents=True, exist_ok=True)
    (out / results.NAME).unlink(missing_ok=True)
    plan = make_plan(container, settings, catalogue)
    Path(plan.out).mkdir(parents=True, exist_ok=True)
    if left := _left(plan):
        preflight.require(plan, catalogue.known(plan.settings))
        try:
            with worker.told(plan):
                run(replace(plan, tasks=left))
        except EvaluationError as error:
            raise _unfinished(plan, str(error), error.status) from error
        if _left(plan):
            raise _unfinished(plan, "the worker ended without results", 1)
    (subject,) = plan.subjects
    folders = [plan.folder(subject.name, task) for task in plan.tasks]
    for folder, task in zip(folders, plan.tasks, strict=True):
        results.read(folder, [task], base=plan.base_digest, adapter=subject.digest)
    collect(folders, out)
    return out / results.NAME


def make_plan(container: Container, settings: params.Params, catalogue: Catalogue) -> Plan:
    base, config = find_base(container.base_model)
    subject = find_adapter(container, base)
    names = list(dict.fromkeys(catalogue.resolve(container.benchmark_tasks, settings.evaluate.include)))
    revision = "" if Path(base).is_dir() else config.parent.name
    identity = models.identify(settings.base.model_copy(update={"model": base, "revision": revision}))
    kept = container.output_dir.absolute() / KEPT
    evaluate = settings.evaluate.model_copy(
        update={
            "tasks": names,
            "max_model_len": settings.evaluate.max_model_len or min(CONTEXT, _context(config)),
            "cache": str(kept / "replies"),
        }
    )
    same = evaluate.model_dump(
        mode="json", exclude={"tasks", "timeout_s", "cache", "where", "docker", "after_training"}
    )
    mark = digest.of_json([identity.digest, same, catalogue.contents(names, evaluate), fingerprint.code()])[:12]
    backend = preflight.choose_backend(evaluate)
    whole = settings.model_copy(update={"evaluate": evaluate})
    return Plan(base, revision, identity.digest, "auto", [subject], names, backend, whole, str(kept / mark))


def find_base(written: str) -> tuple[str, Path]:
    """The folder, or the hub id, and its config.json: a hub id's is fetched, into a folder that is named by commit."""
    folder = Path(written)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SettingsError(f"BASE_MODEL is {written!r}; expected a model's folder, but it has no config.json")
        return str(folder.absolute()), folder / "config.json"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return written, Path(hf_hub_download(written, "config.json"))
    except (HFValidationError, RepositoryNotFoundError):
        raise SettingsError(f"BASE_MODEL is {written!r}; expected a folder that is there, or a hub id") from None
    except OSError as error:
        said = str(error).strip().splitlines()[0]
        raise SetupError(
            f"BASE_MODEL is {written!r}, which is no folder here, and from the hub it cannot be had: {said}. "
            "Mount a folder with the model and name that, or let the container reach the hub"
        ) from None


def find_adapter(container: Container, base: str) -> Subject:
    if container.adapter_path == NO_ADAPTER:
        return Subject(BASE)
    folder = Path(container.adapter_path).absolute()
    if not folder.is_dir():
        raise SettingsError(
            f"ADAPTER_PATH is {container.adapter_path!r}: Output directory not found; expected an adapter's folder, or "
            f"{NO_ADAPTER} for the base alone"
        )
    facts = adapters.validate(folder, None, Path(base) if Path(base).is_dir() else None)
    return Subject(facts.digest[:12], facts.digest, str(folder), facts.rank)


def collect(folders: Sequence[Path], out: Path) -> None:
    """Samples and lm-eval's own files of all tasks, and, last, results.json: theirs as one."""
    for folder in folders:
        for file in sorted(folder.rglob("*.json*")):
            if file.name != results.NAME and file.is_file():
                shutil.copyfile(file, out / file.name)
    merged: dict[str, Any] = {}
    for folder in folders:
        merged = _merged(merged, json.loads((folder / results.NAME).read_text(encoding="utf-8")))
    with jsonl.whole(out / results.NAME) as whole:
        whole.write(json.dumps(merged, indent=2, ensure_ascii=False) + "\n")


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two results as one: tables joined, times added up; of what is said twice, the later."""
    joined = dict(one)
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(one.get(key), dict):
            joined[key] = _merged(one[key], value)
        elif key == "total_evaluation_time_seconds" and key in one:
            joined[key] = str(float(one[key]) + float(value))
        else:
            joined[key] = value
    return joined


def _context(config: Path) -> int:
    """The model's own limit, where it is where most models have it."""
    try:
        tree = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"BASE_MODEL: {config}: not a model's configuration: {error}") from None
    return int(tree.get("max_position_embeddings") or CONTEXT)


def _left(plan: Plan) -> list[str]:
    done = process.done(plan)
    return [task for task in plan.tasks if task not in done]


def _unfinished(plan: Plan, why: str, status: int) -> EvaluationError:
    done, left = process.done(plan), _left(plan)
    said = f"done: {', '.join(done) or 'nothing'}; without results: {', '.join(left) or 'nothing'}"
    return EvaluationError(f"{why}; {said}; the same command goes on from there", done=done, status=status)


def _stop(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it to the process and to its group
    raise EvaluationError(f"ended by {signal.Signals(number).name}", status=128 + number)


def _failed(message: str, status: int) -> int:
    print(f"gradeflow: failed, status {status}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
