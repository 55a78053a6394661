"""Runs third-party graders and preparers. It is imported inside the sandbox, and never by the host.

A job names a function as competition files do, `package.competitions.ID.grade:grade` or `grade.py:grade`; the folder
that the task lies in says where it is, whatever the package is called and whether it is installed. `grade_helpers`,
`utils` and `metrics` of the package are its own where they can be imported; else what is in stand_ins takes their
place.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.util
import io
import json
import math
import os
import pickle
import select
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOTS = ("mlebench", "benchmarks", "task")
HELPERS = ("grade_helpers", "utils", "metrics")
STAND_INS = Path(__file__).with_name("stand_ins")
MOST_REPLY = 1 << 16
MOST_OPEN = 1 << 10

# What pickles of arrays, tables and plain values name, in today's versions and older ones. Nothing here opens a file or
# calls what it is given.
_ARRAYS = {"ArrowStringArray", "BooleanArray", "DatetimeArray", "FloatingArray", "IntegerArray", "PeriodArray"}
_DTYPES = {"BooleanDtype", "CategoricalDtype", "DatetimeTZDtype", "PeriodDtype", "StringDtype"}
_INDEXES = {"CategoricalIndex", "DatetimeIndex", "Index", "IntervalIndex", "MultiIndex", "RangeIndex", "TimedeltaIndex"}
PICKLED = {
    "builtins": {"bytearray", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice", "str"},
    "__builtin__": {"bytearray", "slice"},
    "_codecs": {"encode"},
    "collections": {"OrderedDict"},
    "copyreg": {"_reconstructor"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "numpy": {"dtype", "ndarray", "bool_", "str_"},
    **{f"numpy.{core}.multiarray": {"_reconstruct", "scalar"} for core in ("core", "_core")},
    **{f"numpy.{core}.numeric": {"_frombuffer"} for core in ("core", "_core")},
    "numpy.ma": {"MaskedArray"},
    "numpy.ma.core": {"_mareconstruct", "MaskedArray"},
    "pandas": {"Categorical", "DataFrame", "NA", "Series", *_DTYPES, *_INDEXES}
    | {f"{kind}{bits}Dtype" for kind in ("Float", "Int", "UInt") for bits in (8, 16, 32, 64)},
    "pandas.arrays": {"StringArray", "TimedeltaArray", *_ARRAYS},
    "pandas._libs.arrays": {"__pyx_unpickle_NDArrayBacked"},
    "pandas._libs.internals": {"_unpickle_block", "BlockPlacement"},
    "pandas._libs.missing": {"NAType"},
    "pandas._libs.tslibs.nattype": {"_nat_unpickle"},
    "pandas._libs.tslibs.timedeltas": {"_timedelta_unpickle"},
    "pandas._libs.tslibs.timestamps": {"_unpickle_timestamp"},
    "pandas.core.arrays.categorical": {"Categorical"},
    "pandas.core.arrays.datetimes": {"DatetimeArray"},
    "pandas.core.arrays.string_": {"StringArray", "StringDtype"},
    "pandas.core.dtypes.dtypes": {"CategoricalDtype", "DatetimeTZDtype"},
    "pandas.core.frame": {"DataFrame"},
    "pandas.core.indexes.base": {"Index", "_new_Index"},
    "pandas.core.indexes.datetimes": {"DatetimeIndex", "_new_DatetimeIndex"},
    "pandas.core.indexes.interval": {"_new_IntervalIndex"},
    "pandas.core.indexes.multi": {"MultiIndex"},
    "pandas.core.indexes.range": {"RangeIndex"},
    "pandas.core.indexes.timedeltas": {"_new_TimedeltaIndex"},
    "pandas.core.internals.blocks": {"new_block"},
    "pandas.core.internals.managers": {"BlockManager", "SingleBlockManager"},
    "pandas.core.series": {"Series"},
    "pyarrow.lib": {"_restore_array", "py_buffer", "type_for_alias"},
}


class DataUnpickler(pickle.Unpickler):
    """A pickle is a program. A submission's may build arrays, tables and plain values, and do nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in PICKLED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not data")
        return super().find_class(module, name)


class Helper(importlib.machinery.SourceFileLoader):
    """A helper module of a package, or its stand-in where what it imports is not installed."""

    def exec_module(self, module: types.ModuleType) -> None:
        try:
            super().exec_module(module)
        except ImportError:
            stand_in = STAND_INS / f"{module.__name__.rpartition('.')[2]}.py"
            exec(compile(stand_in.read_bytes(), str(stand_in), "exec"), module.__dict__)  # noqa: S102 - our own file


class Helpers:
    """Finds helper modules for graders, wherever they look for them: beside themselves, above, or in the package."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> Any:
        root, last = name.partition(".")[0], name.rpartition(".")[2]
        if root not in ROOTS or last not in HELPERS:
            return None
        places = [Path(folder) / f"{last}.py" for folder in [*(path or ()), *self.folders]]
        found = next((place for place in places if place.is_file()), STAND_INS / f"{last}.py")
        return importlib.util.spec_from_file_location(name, found, loader=Helper(name, str(found)))


def function(job: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that a job names. `folder` holds the task, `package` the folder of tasks and its helpers."""
    named, _, attribute = job["function"].partition(":")
    folder = Path(job["folder"])
    _, within, rest = named.partition(f".competitions.{folder.name}.")
    if named.endswith(".py"):
        package, file = "task", named
    elif within:
        package, file = named[: -len(rest) - 1], f"{rest.replace('.', '/')}.py"
    else:
        return getattr(importlib.import_module(named), attribute)  # type: ignore[no-any-return]
    above = [folder.parent, folder.parent.parent] if folder.parent.name == "competitions" else [folder.parent]
    sys.meta_path.insert(0, Helpers(above))
    _declare(package, folder, above)
    spec = importlib.util.spec_from_file_location(f"{package}.{Path(file).stem}", folder / file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute)  # type: ignore[no-any-return]


def _declare(package: str, folder: Path, above: Sequence[Path]) -> None:
    """Make the packages that a task lies in known. Installed ones keep their place, and the task has its folder."""
    names = package.split(".")
    parents = [".".join(names[:length]) for length in range(1, len(names))]
    folders = dict(zip(reversed(parents), above, strict=False))
    for name in parents:
        try:
            importlib.import_module(name)
        except ImportError:
            _package(name, folders.get(name))
    _package(package, folder)


def _package(name: str, folder: Path | None) -> None:
    module = types.ModuleType(name)
    module.__path__ = [str(folder)] if folder else []
    sys.modules[name] = module


def load(path: Path, unpickler: type[pickle.Unpickler], *, exact: bool) -> Any:
    """A submission's or an answer file's content, as graders take it; of an unknown kind, its path."""
    import pandas as pd

    suffix = path.suffix.lower()
    if suffix == ".csv":
        if not exact:
            return pd.read_csv(path)
        try:
            return pd.read_csv(path, float_precision="round_trip")
        except pd.errors.EmptyDataError:
            return pd.DataFrame()
    if suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if suffix == ".json":
        return pd.read_json(path)
    if suffix in {".pkl", ".pickle"}:
        return unpickler(io.BytesIO(path.read_bytes())).load()
    return path


def grade(job: Mapping[str, Any]) -> dict[str, Any]:
    graded = function(job)
    answers = load(Path(job["answers"]), pickle.Unpickler, exact=job["exact"]) if job["answers"] else None
    try:
        submission = load(Path(job["submission"]), DataUnpickler, exact=job["exact"])
    except Exception as error:  # noqa: BLE001 - whatever a reader stumbles over is the submission's doing
        return {"invalid": f"{type(error).__name__}: {error}"[:500]}
    try:
        score = float(graded(submission, answers))
    except Exception as error:
        if any(kind.__name__ == "InvalidSubmissionError" for kind in type(error).__mro__):
            return {"invalid": str(error)[:500]}
        raise
    return {"score": score} if math.isfinite(score) else {"no_number": repr(score)}


def prepare(job: Mapping[str, Any]) -> dict[str, Any]:
    folders = {name: Path(job[name]).absolute() for name in ("raw", "public", "private")}
    for name in ("public", "private"):
        folders[name].mkdir(parents=True, exist_ok=True)
    function(job)(**folders)
    return {}


WORK = {"grade": grade, "prepare": prepare}


def done(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job; whatever the third party's code raises is told, with the line of it."""
    try:
        return WORK[job["kind"]](job)
    except BaseException as error:  # noqa: BLE001 - SystemExit too
        frames = [step for step in traceback.extract_tb(error.__traceback__) if step.filename != __file__]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        return {"crashed": f"{type(error).__name__}: {error}"[:500] + place}


def forked(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job in a child, so that nothing of it is left for the next, and its end is not the end of this process."""
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError:  # the sandbox allows none, so this process does this job and no other
        return {**done(job), "last": True}
    if child == 0:
        _child(job, writing)
    os.close(writing)
    told, deadline = b"", time.monotonic() + job["wall_s"]
    while len(told) < MOST_REPLY and not told.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            told = b'{"timed_out": true}\n'
            break
        if not (chunk := os.read(reading, MOST_REPLY)):
            break
        told += chunk
    os.close(reading)
    for kill, target in ((os.killpg, child), (os.kill, child)):
        with contextlib.suppress(ProcessLookupError):
            kill(target, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        said = json.loads(told)
    except ValueError:
        return {"crashed": f"its process ended with status {status}"}
    return said if isinstance(said, dict) else {"crashed": "it answered in the grader's place"}


def _child(job: Mapping[str, Any], writing: int) -> NoReturn:
    """The job alone: without what is open to the host, and with nowhere to print to."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    os.closerange(3, writing)
    os.closerange(writing + 1, MOST_OPEN)
    os.write(writing, json.dumps(done(job)).encode() + b"\n")
    os._exit(0)


def _warm() -> None:
    """What the first table costs is paid here, once for all children; they do not copy memory to count references."""
    import pandas as pd

    pd.read_csv(io.StringIO("a,b\n0,x\n"))
    gc.collect()
    gc.freeze()


def main(harness: Any) -> None:
    """Do job after job as the host hands them over, until it has no more."""
    _warm()
    said = None
    while (job := harness.call("next", said=said)) is not None:
        said = forked(job)
