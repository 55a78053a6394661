"""What the loop puts into checkpoints, and what it keeps out of them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradeflow.errors import AdapterError, SettingsError
from gradeflow.grpo import checkpoint, loop
from gradeflow.grpo.environment import Graded
from gradeflow.grpo.rollouts import Batch
from gradeflow.types import Example
from support import courses
from support.courses import Grader

pytestmark = pytest.mark.filterwarnings("ignore")  # torch and TRL
ONE_STEP = {
    "train__max_steps": 1,
    "train__eval_every": 1,
    "train__prompts_per_step": 1,
    "train__warmup_steps": 0,
    "train__max_replaced_groups": 0,
}


class Silent:
    """A stand-in for the stage: remembers what was reported."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.checkpoints: list[Path] = []

    def step(self, number: int, logs: Mapping[str, float], batch: Batch) -> None:
        self.steps.append(number)

    def checkpoint(self, number: int, adapter: Path) -> None:
        self.checkpoints.append(adapter)


@pytest.mark.parametrize(("value", "said"), [(0.0, "does nothing"), (math.nan, "NaN"), (math.inf, "infinity")])
def test_an_adapter_that_training_has_broken_is_in_no_checkpoint(
    value: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """A stand-in for an update."""
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            weight.data.fill_(value)

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    silent = Silent()
    with courses.course(tmp_path, Grader(lambda _: [0.0, 1.0, 1.0, 0.0]), **ONE_STEP) as small:
        with pytest.raises(AdapterError, match=rf"^step 1: training has broken the adapter, and stops\. .*{said}"):
            loop.train(small.course, small.settings.train, silent)
        assert checkpoint.newest(small.course.folder) is None
    assert (silent.steps, silent.checkpoints) == ([1], [])


@pytest.mark.parametrize(
    ("logs", "learnt"),
    [
        ([], False),
        ([{"learning_rate": 0.0, "grad_norm": 0.5}], False),
        ([{"learning_rate": 0.1, "grad_norm": 0.0}, {"train_runtime": 1.0}], False),
        ([{"learning_rate": 0.0, "grad_norm": 0.5}, {"learning_rate": 0.1, "grad_norm": 0.5}], True),
        ([{"learning_rate": 0.1, "grad_norm": math.nan}], True),
    ],
)
def test_an_adapter_that_no_update_has_moved_need_not_do_anything_yet(
    logs: list[dict[str, float]], learnt: bool
) -> None:
    assert loop.has_learnt(logs) == learnt


def test_all_that_was_asked_is_checked_on_the_judge_once(tmp_path: Path) -> None:
    """Two updates on each batch: two wrong answers of the group that is learnt from, four of the one before it."""

    class Fooled(Grader):
        """A stand-in whose judge calls all answers right; all of the first question's are wrong."""

        async def grade(self, text: str, example: Example) -> Graded:
            graded = await super().grade(text, example)
            return replace(graded, sample=replace(graded.sample, answer="wrong", judged=True))

    grades = courses.by_order([[0.0] * 4, *[[0.0, 1.0, 1.0, 0.0]] * 5])
    twice = {**ONE_STEP, "train__ppo_epochs": 2, "train__eval_every": 2, "train__max_steps": 2}
    logs: list[Mapping[str, float]] = []

    class Keeping(Silent):
        def step(self, number: int, told: Mapping[str, float], batch: Batch) -> None:
            logs.append(told)

    with courses.course(tmp_path, Fooled(grades), **{**twice, "train__max_replaced_groups": 1}) as small:
        loop.train(small.course, small.settings.train, Keeping())
    assert [told["judge/checked"] for told in logs] == [6, 6]


def test_questions_that_are_too_long_are_told_before_the_first_is_asked(tmp_path: Path) -> None:
    grader = Grader(lambda _: [1.0])
    with courses.course(tmp_path, grader, train__max_prompt_tokens=200) as small:
        course, settings = small.course, small.settings.train
        encode = loop.episodes_of(course, settings).encode
        lengths = [len(encode(grader.opening(one))) for one in course.examples]
        loop.require_room(course, course.examples, settings.model_copy(update={"max_prompt_tokens": max(lengths)}))
        short = settings.model_copy(update={"max_prompt_tokens": min(lengths)})
        many = sum(length > min(lengths) for length in lengths)
        said = rf"is {min(lengths)}; {many} of 6 questions take more, .*: {max(lengths)}\."
        with pytest.raises(SettingsError, match=said):
            loop.require_room(course, course.examples, short)
    assert grader.asked == []


def test_what_was_seen_of_the_judge_is_in_the_checkpoint(tmp_path: Path) -> None:
    with courses.course(tmp_path, Grader(lambda _: [0.0, 1.0, 1.0, 0.0]), **ONE_STEP) as small:
        loop.train(small.course, small.settings.train, Silent())
        last = checkpoint.newest(small.course.folder)
        assert last is not None
        assert checkpoint.state_of(last)["alarm"] == [[]]
