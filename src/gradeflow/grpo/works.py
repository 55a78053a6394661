"""What a policy is trained to do, by `train.environment`: to write workflows, or to solve modeling tasks."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradeflow import agent, attempt, benchmarks, dataset, prompt, readiness
from gradeflow.dataset import Dataset
from gradeflow.grpo import environment as environments
from gradeflow.grpo import modeling
from gradeflow.grpo.environment import Environment, WorkflowEnvironment
from gradeflow.grpo.modeling import ModelingEnvironment
from gradeflow.params import Params
from gradeflow.prompt import Prompt

SECTIONS = ("train", "base", "models", "workflow", "judge", "scorer", "sandbox")


@dataclass(frozen=True, slots=True)
class Work:
    """On which questions, asked by which prompts, in which environment. The result depends on these `sections`."""

    train: Dataset
    validation: Dataset
    prompts: Sequence[Prompt]
    environment: Callable[[], Environment]
    require_ready: Callable[[], Coroutine[Any, Any, None]]
    sections: Sequence[str] = SECTIONS


def of(params: Params, made: Path) -> Work:
    """Work on data/mixed, or on tasks; built-in ones come to lie in `made`."""
    if params.train.environment == "workflow":
        return _workflows(params)
    return _tasks(params, Path(params.solve.data_dir) if params.solve.data_dir else made)


def _workflows(params: Params) -> Work:
    train, validation = dataset.read("train"), dataset.read("validation")
    ready = partial(environments.require_ready, params)
    return Work(train, validation, environments.prompts(params), partial(WorkflowEnvironment, params), ready)


def _tasks(params: Params, data: Path) -> Work:
    benchmark = benchmarks.canonical(params.solve.benchmark)
    params = params.model_copy(update={"solve": params.solve.model_copy(update={"benchmark": benchmark})})
    found, split = modeling.tasks(params, data)
    train, validation = modeling.datasets(found, split, benchmark)
    prompts = [prompt.load(name) for name in agent.PROMPTS]
    ready = partial(readiness.check, attempt.limits(params), {})
    environment = partial(ModelingEnvironment, params, found)
    return Work(train, validation, prompts, environment, ready, (*SECTIONS, "solve"))
