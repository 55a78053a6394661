"""Training whose rollouts break down for a while: a named stand-in says that they have, all else is real."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradeflow import digest
from gradeflow.errors import CollapseError
from gradeflow.grpo import checkpoint, loop
from gradeflow.grpo.environment import Graded
from gradeflow.grpo.rollouts import Batch
from gradeflow.types import Example
from support import courses
from support.courses import GROUP, Grader, Small

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and TRL

STEP = 4 * GROUP
"""Rollouts of one step."""
BROKEN = range(4 * STEP, 6 * STEP)
"""The grades of steps 5 and 6."""
SETTINGS = {
    "train__prompts_per_step": 4,
    "train__micro_batch": 16,
    "train__max_steps": 8,
    "train__eval_every": 2,
    "train__warmup_steps": 0,
    "train__lr_schedule": "constant",
    "train__learning_rate": 0.01,
    "train__max_replaced_groups": 0,
    "train__guard__window": 2,
    "train__guard__patience": 1,
    "train__guard__reward_drop": 0.3,
    "train__guard__learning_rate_factor": 0.5,
}


class Breaking(Grader):
    """A stand-in: the score follows from the text, but some grades, by count, are of a policy that has broken down."""

    def __init__(self, broken: range, count: int = 0) -> None:
        super().__init__(lambda _: [])
        self._broken = broken
        self._count = count

    async def grade(self, text: str, example: Example) -> Graded:
        place, self._count = self._count, self._count + 1
        graded = await super().grade(text, example)
        if place not in self._broken:
            return graded
        return replace(graded, sample=replace(graded.sample, score=0.0, valid=False))

    def score(self, text: str, example: Example) -> float:
        return 0.4 + 0.2 * (int(digest.of_bytes(f"{example.id} {text}".encode())[0], 16) % 2)


class Watcher:
    """Keeps what the loop reports, and the weights after each step, before the guard has its say."""

    def __init__(self, small: Small, killed: Callable[[int], bool]) -> None:
        self.logs: dict[int, Mapping[str, float]] = {}
        self.batches: dict[int, Batch] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.collapses: dict[int, str] = {}
        self._small = small
        self._killed = killed

    def step(self, number: int, logs: Mapping[str, float], batch: Batch) -> None:
        if self._killed(number):
            raise KeyboardInterrupt
        self.logs[number], self.batches[number], self.weights[number] = logs, batch, adapter(self._small)

    def checkpoint(self, number: int, adapter: Path) -> None: ...

    def collapse(self, number: int, reason: str) -> None:
        self.collapses[number] = reason


def adapter(small: Small) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in small.course.model.named_parameters() if "lora" in name}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())


@contextmanager
def trained(
    folder: Path, broken: range = BROKEN, killed: Callable[[int], bool] = lambda _: False, done: int = 0, **changes: Any
) -> Iterator[tuple[Small, Watcher]]:
    """A course that was trained to its end, or killed; `done` steps are in its folder already."""
    with courses.course(folder, Breaking(broken, done * STEP), **SETTINGS | changes) as small:
        watcher = Watcher(small, killed)
        with suppress(KeyboardInterrupt):
            loop.train(small.course, small.settings.train, watcher)
        yield small, watcher


def test_a_collapsed_run_goes_back_lowers_its_rate_and_goes_on(tmp_path: Path) -> None:
    """Steps 1 and 2 prove the start, steps 3 and 4 what was learnt in step 2; that is where it goes back to."""
    with trained(tmp_path) as (small, seen):
        assert list(seen.collapses) == [6]
        assert seen.collapses[6].startswith("reward 0 (it was 0.")
        assert "valid_share 0, below 0.5 (it was 1)" in seen.collapses[6]
        assert seen.collapses[6].endswith("Back to the adapter of step 2, at 0.5 of the learning rate")
        rates = {number: logs["learning_rate"] for number, logs in seen.logs.items()}
        assert rates == pytest.approx(dict.fromkeys(range(1, 7), 0.01) | {7: 0.005, 8: 0.005})
        assert [seen.logs[number]["guard/rollbacks"] for number in (6, 7)] == [0, 1]
        assert seen.logs[6]["guard/valid_share"] == 0
        after = checkpoint.newest(small.course.folder)
        assert after is not None
        assert after.name == "checkpoint-8"
        kept = torch.load(after.with_name("checkpoint-6") / "optimizer.pt", weights_only=True)
        assert kept["state"] == {}
        assert not same(seen.weights[6], seen.weights[2])
        assert not same(seen.weights[7], seen.weights[2])
        from safetensors.torch import load_file

        saved = load_file(after.with_name("checkpoint-6") / "adapter_model.safetensors")
        assert saved.keys() == {name.replace(".default", "") for name in seen.weights[2]}
        assert all(torch.equal(weight, saved[name.replace(".default", "")]) for name, weight in seen.weights[2].items())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("last", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_collapses_and_goes_back_as_the_uninterrupted_one(last: int, tmp_path: Path) -> None:
    """Killed a step after the checkpoint before the collapse, or after the one that has gone back already."""
    with trained(tmp_path / "whole") as (_, whole):
        pass
    with trained(tmp_path / "halves", killed=lambda number: number > last):
        pass
    with trained(tmp_path / "halves", done=last) as (_, again):
        assert list(again.weights) == list(range(last + 1, 9))
        assert same(again.weights[8], whole.weights[8])
        assert again.collapses == {number: said for number, said in whole.collapses.items() if number > last}
        assert again.logs[8]["learning_rate"] == whole.logs[8]["learning_rate"]
        assert again.logs[8]["guard/rollbacks"] == 1


def test_a_checkpoint_may_be_back_at_the_start_which_changes_nothing(tmp_path: Path) -> None:
    """Before anything has proved healthy, step 4 goes back to the adapter of the start, whose B is zero."""
    with courses.course(tmp_path, Breaking(range(2 * STEP, 4 * STEP)), **SETTINGS) as small:
        for name, weight in small.course.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(weight)
        watcher = Watcher(small, lambda _: False)
        loop.train(small.course, small.settings.train, watcher)
        assert watcher.collapses[4].endswith("Back to the adapter of step 0, at 0.5 of the learning rate")
        newest = checkpoint.newest(small.course.folder)
    assert newest is not None
    assert newest.name == "checkpoint-8"


def test_no_update_learns_from_what_a_collapsed_policy_wrote(tmp_path: Path) -> None:
    """At staleness 2 the rollouts of steps 7 and 8 were on their way."""
    with trained(tmp_path, train__staleness=2) as (_, seen):
        assert list(seen.collapses) == [6]
        assert [{one.version for one in seen.batches[number].rollouts} for number in (5, 6, 7)] == [{2}, {3}, {6}]


def test_one_collapse_too_many_ends_training_and_leaves_its_checkpoints(tmp_path: Path) -> None:
    changes = SETTINGS | {"train__guard__max_rollbacks": 0}
    with courses.course(tmp_path, Breaking(BROKEN), **changes) as small:
        watcher = Watcher(small, lambda _: False)
        with pytest.raises(CollapseError, match=r"^step 6: the policy collapsed after 0 returns .*: reward 0 \(it was"):
            loop.train(small.course, small.settings.train, watcher)
        assert 6 in watcher.logs
        newest = checkpoint.newest(small.course.folder)
        assert newest is not None
        assert newest.name == "checkpoint-4"


def test_without_a_guard_nothing_is_watched_and_nothing_kept(tmp_path: Path) -> None:
    with trained(tmp_path, train__guard__enabled="false", train__max_steps=6) as (small, seen):
        assert seen.collapses == {}
        assert not [name for name in seen.logs[6] if name.startswith("guard/")]
        assert not list(small.course.folder.glob("*/guard.safetensors"))
