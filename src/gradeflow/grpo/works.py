"""What a policy is trained to do, by `train.environment`: to write workflows, or to solve modeling tasks."""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradeflow import agent, attempt, dataset, prompt, readiness
from gradeflow.benchmarks.catalogue import Benchmark
from gradeflow.dataset import Dataset
from gradeflow.errors import SettingsError
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


@contextmanager
def opened(params: Params) -> Iterator[Work]:
    """Work on data/mixed, or on tasks, whose graders run as long as the context lasts."""
    if params.train.environment == "workflow":
        yield _workflows(params)
        return
    if params.base.model == "embedded":
        raise SettingsError(
            "base.model is 'embedded', which writes workflows and no experiments: nothing could be learnt. Name a base "
            "that can: --model-path and --base.revision, or gradeflow profile use qwen2.5-7b"
        )
    with Benchmark(params.solve, params.sandbox, params.grade) as benchmark:
        yield _tasks(params, benchmark)


def _workflows(params: Params) -> Work:
    train, validation = dataset.read("train"), dataset.read("validation")
    ready = partial(environments.require_ready, params)
    return Work(train, validation, environments.prompts(params), partial(WorkflowEnvironment, params), ready)


def _tasks(params: Params, benchmark: Benchmark) -> Work:
    params = params.model_copy(update={"solve": params.solve.model_copy(update={"benchmark": benchmark.name})})
    found, split = modeling.tasks(params, benchmark)
    train, validation = modeling.datasets(found, split, benchmark.name)
    prompts = [prompt.load(name) for name in agent.PROMPTS]
    ready = partial(readiness.check, attempt.limits(params), {})
    environment = partial(ModelingEnvironment, params, found)
    return Work(train, validation, prompts, environment, ready, (*SECTIONS, "solve", "grade"))
