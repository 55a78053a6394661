"""`gradeflow prepare`: a competition's public and private files, made from its raw ones by its own preparer."""

from pathlib import Path

from gradeflow.benchmarks.catalogue import MODES, Benchmark
from gradeflow.benchmarks.folders import drift
from gradeflow.errors import DataError, GradeflowError, SettingsError
from gradeflow.params import Params


def main(params: Params, *, task: str, dataset_file: str, mode: str) -> None:
    """Prepare what is not prepared yet.

    Raises:
        DataError: some could not be; each is named on a line of its own.
    """
    if mode not in MODES:
        raise SettingsError(f"--mode is {mode!r}; expected one of {', '.join(MODES)}")
    failed: list[GradeflowError] = []
    everything = params.solve.model_copy(update={"quarantine": ""})
    with Benchmark(everything, params.sandbox, params.grade, mode=mode) as opened:
        ids = opened.chosen(task, Path(dataset_file) if dataset_file else None)
        for task_id in ids:
            try:
                print(f"{task_id}: {_prepare(opened, task_id)}")
            except GradeflowError as error:
                failed.append(error)
                print(f"{task_id}: FAILED: {error}")
    if failed:
        raise DataError(f"{len(failed)} of {len(ids)} were not prepared: {failed[0]}")


def _prepare(benchmark: Benchmark, task_id: str) -> str:
    competition = benchmark.competition(task_id)
    if competition.public_dir.is_dir():
        return f"prepared already; remove {competition.public_dir} to prepare it again"
    competition.prepare()
    changed = drift(competition)
    return f"prepared; not as its checksums say: {', '.join(changed)}" if changed else "prepared"
