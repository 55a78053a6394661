"""One file of lm-eval's results: its shape is checked, and its tasks and groups become records."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradeflow import digest as digests
from gradeflow.errors import EvaluationError

T = TypeVar("T")

FIRST, LAST = (0, 4, 9), (0, 4, 13)

PRIMARY: Mapping[str, Sequence[str]] = {
    "arc": ["acc_norm"],
    "cmmlu": ["acc"],
    "commonsense_qa": ["acc"],
    "drop": ["f1"],
    # strict-match looks for `#### 42`, which a chat model seldom writes and which can be learnt without any
    # arithmetic; flexible-extract takes the last number, and so measures whether the answer is right.
    "gsm8k": ["exact_match,flexible-extract"],
    "hellaswag": ["acc_norm"],
    "hendrycks_math": ["math_verify", "exact_match"],
    "humaneval": ["pass@1"],
    "mbpp": ["pass_at_1"],
    "minerva_math": ["math_verify", "exact_match"],
    "mmlu": ["acc"],
}
"""What stands for a task and its variants, such as gsm8k_cot: the first of these metrics that it has."""

_SHARES = re.compile(
    r"[^/]+/(acc(_\w+)?|exact_match|em|math_verify|pass(@|_at_)\d+|(prompt|inst)_level_\w+)"
    r"|(drop|coqa)[^/]*/f1|gradeflow_workflow/(score|valid)"
)


class Metric(NamedTuple):
    """`stderr` is None where lm-eval gives none."""

    value: float
    stderr: float | None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What was measured on a task or, with `subtasks`, on a group of them.

    `metric` is the primary one, written `metric,filter` as lm-eval does; `metrics` are all of them. `n` is how many
    questions were asked. `hash` is lm-eval's over questions, prompts and targets, of a group over its subtasks', and
    empty where no samples were kept. `num_fewshot` and `higher_is_better` are None where a group's tasks differ.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    n: int
    num_fewshot: int | None
    version: str
    hash: str
    higher_is_better: bool | None
    metrics: Mapping[str, Metric]
    subtasks: tuple["TaskResult", ...] = ()

    @property
    def is_share(self) -> bool:
        """Whether the value is a share of the questions. Its size does not tell: a perplexity can be below 1."""
        return _SHARES.fullmatch(f"{self.task}/{self.metric.partition(',')[0]}") is not None and 0 <= self.value <= 1

    def walk(self) -> Iterator["TaskResult"]:
        """This one and all below it."""
        yield self
        for subtask in self.subtasks:
            yield from subtask.walk()

    def leaves(self) -> list["TaskResult"]:
        """The tasks proper, each once."""
        return list({one.task: one for one in self.walk() if not one.subtasks}.values())


class _Count(BaseModel):
    original: int
    effective: int


class _Ours(BaseModel):
    base: dict[str, str]
    adapter: str


class _Content(BaseModel):
    """The part of lm-eval's file that is read, with its shape."""

    model_config = ConfigDict(protected_namespaces=())

    results: dict[str, dict[str, Any]]
    group_subtasks: dict[str, list[str]] = {}
    configs: dict[str, dict[str, Any]]
    versions: dict[str, str | int | float | None]
    num_fewshot: dict[str, int | None] = Field(alias="n-shot")
    higher_is_better: dict[str, dict[str, bool | None]]
    counts: dict[str, _Count] = Field(alias="n-samples")
    config: dict[str, Any]
    date: float = 0.0
    lm_eval_version: str = "unknown"
    model_name: str = ""
    task_hashes: dict[str, str] = {}
    gradeflow: _Ours | None = None


@dataclass(frozen=True, slots=True)
class Report:
    file: Path
    content: _Content

    @property
    def note(self) -> str:
        """That lm-eval's version is none of those known, or nothing."""
        version = self.content.lm_eval_version
        return (
            ""
            if _is_known(version)
            else f"{self.file}: lm-eval {version} is not {_range()}, but its file has their shape"
        )

    def roots(self) -> list[str]:
        """The tasks and groups that belong to no other."""
        below = {name for children in self.content.group_subtasks.values() for name in children}
        return [name for name in self.content.results if name not in below]

    def names(self, task: str) -> list[str]:
        """What a task, group, tag or YAML file that was asked for is called in the results; nothing if it is not there.

        A group without a metric of its own, and a tag, are the tasks that belong to it.
        """
        own = _named(task)
        if own in self.content.results or own in self.content.group_subtasks:
            return self._with_metrics(own)
        tags = {name: config.get("tag") or [] for name, config in self.content.configs.items()}
        return [name for name, tag in tags.items() if own in ([tag] if isinstance(tag, str) else tag)]

    def parse(self, name: str, primary: Mapping[str, str], inherited: str = "") -> TaskResult:
        """What was measured on one task or group of the results, and on all below it.

        Raises:
            EvaluationError: a member of the group is missing, a metric is not finite, or the primary one is not there.
        """
        if name not in self.content.results:
            raise EvaluationError(f"{self.file}: no results of task {name}, though a group here consists of it")
        found = _metrics(self.content.results[name])
        for key, metric in found.items():
            if not math.isfinite(metric.value):
                raise EvaluationError(f"{self.file}: {name}: {key} is {metric.value}; expected a number")
        chosen = primary.get(name, inherited)
        key = self._primary(name, list(found), chosen)
        children = [below for child in self._children(name) for below in self._with_metrics(child)]
        subtasks = tuple(self.parse(child, primary, chosen) for child in children)
        return TaskResult(
            name,
            key,
            *found[key],
            n=self._count(name, subtasks),
            num_fewshot=self.content.num_fewshot.get(name, _common([one.num_fewshot for one in subtasks])),
            version="" if (said := self.content.versions.get(name)) is None else str(said),
            hash=self._hash(name, subtasks),
            higher_is_better=self._direction(name, key),
            metrics=found,
            subtasks=subtasks,
        )

    def require_subject(self, base: str, adapter: str | None, since: float) -> None:
        """Refuse results of another model, as `results.read` says it.

        Raises:
            EvaluationError: whose results these are.
        """
        ours, said = self.content.gradeflow, _arguments(self.content.config.get("model_args"))
        bases = ours.base.values() if ours else (self.content.model_name, said.get("pretrained"), said.get("model"))
        if base and base not in bases:
            whose = " ".join(dict.fromkeys(str(one) for one in bases if one)) or "a model without a name"
            raise EvaluationError(f"{self.file}: these are results of {whose}, not of {base}")
        had = str(ours.adapter if ours else said.get("peft") or said.get("lora_local_path") or "")
        same = had == adapter if ours else bool(had) == bool(adapter)
        if adapter is not None and not same:
            raise EvaluationError(f"{self.file}: these are results of {_subject(had)}, not of {_subject(adapter)}")
        if not ours and self.content.date < since:
            raise EvaluationError(f"{self.file}: left by an earlier evaluation; this one has written no results")

    def _children(self, name: str) -> list[str]:
        return self.content.group_subtasks.get(name) or []

    def _with_metrics(self, name: str) -> list[str]:
        if _metrics(self.content.results.get(name, {})) or not self._children(name):
            return [name]
        return [below for child in self._children(name) for below in self._with_metrics(child)]

    def _primary(self, name: str, keys: Sequence[str], chosen: str) -> str:
        """The chosen metric, else the table's, else the first of the task's own list, else the first computed."""
        if not keys:
            raise EvaluationError(f"{self.file}: {name} has no metric; was it run with predict_only?")
        if chosen:
            if (found := _first(keys, [chosen])) is None:
                raise EvaluationError(f"{self.file}: {name} has no metric {chosen}; it has {' '.join(keys)}")
            return found
        families = [family for family in PRIMARY if f"{name}_".startswith(f"{family}_")]
        table = PRIMARY[max(families, key=len)] if families else ()
        own = [str(entry.get("metric")) for entry in self.content.configs.get(name, {}).get("metric_list") or []]
        return _first(keys, [*table, *own]) or keys[0]

    def _count(self, name: str, subtasks: Sequence[TaskResult]) -> int:
        if subtasks:
            return sum({leaf.task: leaf.n for task in subtasks for leaf in task.leaves()}.values())
        count = self.content.counts.get(name)
        if count is None or count.effective < 1:
            raise EvaluationError(f"{self.file}: {name} has no questions, so its metrics say nothing")
        return count.effective

    def _hash(self, name: str, subtasks: Sequence[TaskResult]) -> str:
        if not subtasks:
            return self.content.task_hashes.get(name, "")
        parts = {one.task: one.hash for one in subtasks}
        return digests.of_json(parts) if all(parts.values()) else ""

    def _direction(self, name: str, key: str) -> bool | None:
        """That of the metric; where lm-eval has it under the name of a function, what all of the task's agree on."""
        directions = self.content.higher_is_better.get(name, {})
        return directions.get(key.partition(",")[0], _common(list(directions.values())))


def load(file: Path) -> Report:
    """Read one file of lm-eval's results.

    Raises:
        EvaluationError: it is not there, empty, half-written, not lm-eval's, or of a version with another shape.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if not text.strip():
            raise EvaluationError(f"{file}: empty; the evaluation has not written its results")
        return checked(file, json.loads(text))
    except OSError as error:
        raise EvaluationError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{file}: half-written, or no JSON: {error}. Delete it and evaluate again") from None


def checked(file: Path, raw: Any) -> Report:
    """The report that `raw` is; `file` is named when it is none.

    Raises:
        EvaluationError: saying which part has another shape.
    """
    if not isinstance(raw, dict) or "results" not in raw:
        raise EvaluationError(f"{file}: not a file of lm-eval's: it has no `results`")
    try:
        return Report(file, _Content.model_validate(raw))
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        version = str(raw.get("lm_eval_version", "unknown"))
        said = "which cannot be read" if not _is_known(version) else "but not as that writes it"
        raise EvaluationError(f"{file}: of lm-eval {version}, {said}; expected {_range()}: {where}") from None


def _is_known(version: str) -> bool:
    parts = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return parts is not None and FIRST <= tuple(int(part) for part in parts.groups()) <= LAST


def _range() -> str:
    return " to ".join(".".join(str(part) for part in version) for version in (FIRST, LAST))


def _named(task: str) -> str:
    """The task or group that a YAML file defines."""
    if not task.endswith((".yaml", ".yml")):
        return task
    file = Path(task)
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    names = dict(re.findall(r"""^(group|task):[ \t]*["']?([^\s"'\[]+)""", text, flags=re.MULTILINE))
    return str(names.get("group", names.get("task", file.stem)))


def _metrics(row: Mapping[str, Any]) -> dict[str, Metric]:
    """What lm-eval computed: the numbers under `metric,filter`. `bypass` says that nothing was."""
    found = {}
    for key, value in row.items():
        metric, comma, kind = key.partition(",")
        if comma and _is_number(value) and metric != "bypass" and not metric.endswith("_stderr"):
            stderr = row.get(f"{metric}_stderr,{kind}")
            found[key] = Metric(value, stderr if _is_number(stderr) and math.isfinite(stderr) else None)
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first(keys: Sequence[str], wanted: Sequence[str]) -> str | None:
    return next((key for one in wanted for key in keys if one in {key, key.partition(",")[0]}), None)


def _common(values: Sequence[T]) -> T | None:
    return values[0] if len(set(values)) == 1 else None


def _arguments(said: object) -> dict[str, Any]:
    """lm-eval's model_args, which 0.4.9 keeps as text."""
    if isinstance(said, str):
        return dict(pair.split("=", 1) for pair in said.split(",") if "=" in pair)
    return dict(said) if isinstance(said, Mapping) else {}


def _subject(adapter: str) -> str:
    return f"adapter {adapter}" if adapter else "the base alone"
