"""Stands in for a model of lm-eval: it answers with what a function makes of each row."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from torch.utils import collect_env

collect_env.get_pretty_env_info = functools.cache(
    collect_env.get_pretty_env_info
)  # a second each time, and always the same

Answer = Callable[[dict[str, Any]], str]


class StandInLM(LM):
    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers up to the first of the task's stop strings, as a model's would be."""
        return [cut(self.answer(request.doc), request.args[1]["until"]) for request in requests]

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


def cut(text: str, stops: Sequence[str]) -> str:
    return min((text.partition(stop)[0] for stop in stops), key=len, default=text)


def evaluated(objects: Sequence[Any], answer: Answer, limit: int | None = None) -> dict[str, dict[str, Any]]:
    """lm-eval's results by task."""
    done = simple_evaluate(
        model=StandInLM(answer),
        tasks=list(objects),
        task_manager=TaskManager(include_defaults=False),
        limit=limit,
        bootstrap_iters=0,
        confirm_run_unsafe_code=True,
    )
    results: dict[str, dict[str, Any]] = done["results"]
    return results
