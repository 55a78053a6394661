"""The loop with TRL's own trainer on a tiny base; a named stand-in gives the scores, and abstains where told to."""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradeflow import models, params, sources
from gradeflow.errors import TooManyFaults
from gradeflow.grpo import loop
from gradeflow.grpo.environment import Graded
from gradeflow.judge import Judge
from gradeflow.params import Params, Train
from gradeflow.types import Example, Rollout, Sample
from support import tiny

GROUP = 4
QUESTIONS = tuple(itertools.islice(sources.made("word_problems", "train", 0), 6))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Train:
    return tiny.settings(tmp_path_factory.mktemp("base")).train


def changed(settings: Train, **values: object) -> Train:
    return settings.model_copy(update=values)


def test_the_temperature_is_constant_without_a_schedule(settings: Train) -> None:
    assert loop.temperature_at(1000, changed(settings, temperature=0.7, temperature_steps=0)) == 0.7


@pytest.mark.parametrize(("step", "expected"), [(0, 0.3), (50, 0.55), (100, 0.8), (500, 0.8)])
def test_the_temperature_follows_its_schedule(settings: Train, step: int, expected: float) -> None:
    schedule = changed(settings, temperature=0.3, temperature_end=0.8, temperature_steps=100)
    assert loop.temperature_at(step, schedule) == pytest.approx(expected)


@pytest.mark.parametrize("micro_batch", [1, 5, 32, 64, 1000])
def test_one_update_covers_whole_groups_whatever_the_micro_batch(
    settings: Train, micro_batch: int, tmp_path: Path
) -> None:
    chosen = changed(settings, prompts_per_step=6, group_size=4, micro_batch=micro_batch)
    config = loop.configure(chosen, tmp_path)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 24
    assert config.per_device_train_batch_size <= max(micro_batch, 1)
    assert config.generation_batch_size == 24


def test_scores_pass_and_missing_ones_stay_missing() -> None:
    assert loop.reward(["a", "b"], [1.0, None]) == [1.0, None]


def test_a_fresh_adapter_changes_nothing(settings: Train, tmp_path: Path) -> None:
    from gradeflow import models

    base, _ = models.load(tiny.settings(tmp_path).base)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        before = base(ids).logits
        after = loop.attach_adapter(base, settings.lora)(ids).logits
    assert torch.equal(before, after)


class Grader:
    """A stand-in for the environment: the n-th answer to a question gets the n-th of its scores, None for a fault."""

    needs = "judge (http://127.0.0.1:9/v1)"
    judge = Judge([], params.load(tiny.ROOT / "params.yaml").judge)

    def __init__(self, scores: Callable[[Example], Sequence[float | None]]) -> None:
        self._scores = scores
        self.asked: list[str] = []

    async def grade_all(self, pairs: Sequence[tuple[str, Example]]) -> list[Graded]:
        places = {example.id: itertools.count() for _, example in pairs}
        self.asked += list(places)
        return [self._graded(text, example, next(places[example.id])) for text, example in pairs]

    def _graded(self, text: str, example: Example, place: int) -> Graded:
        score = self._scores(example)[place]
        fault = "no_verdict" if score is None else None
        sample = Sample(example.id, "", "", "math", text, text, score, "number", valid=True, fault=fault)
        return Graded(sample, (), 0.0)


def course_of(folder: Path, grader: Grader, **changes: object) -> tuple[loop.Course, Params]:
    """A course over QUESTIONS whose adapter is no longer the base, so that there is a KL to pull it back."""
    settings = tiny.settings(folder, train__group_size=GROUP, train__max_completion_tokens=12, **changes)
    torch.manual_seed(0)
    base, tokenizer = models.load(settings.base)
    model = loop.attach_adapter(base, settings.train.lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return loop.Course(model, tokenizer, QUESTIONS, grader, folder / "run", asyncio.run), settings  # type: ignore[arg-type]


def by_order(scores: Sequence[Sequence[float | None]]) -> Callable[[Example], Sequence[float | None]]:
    """Scores for the questions in the order in which they are first asked."""
    waiting = iter(scores)
    given: dict[str, Sequence[float | None]] = {}
    return lambda example: given.setdefault(example.id, next(waiting) if example.id not in given else ())


def one_update(
    course: loop.Course, settings: Params
) -> tuple[list[loop.Group], list[float], dict[str, torch.Tensor], float]:
    """Groups, advantages, gradients and loss of a training step."""
    from transformers import TrainerCallback

    found: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            named = course.model.named_parameters()
            found["gradients"] = {name: each.grad.clone() for name, each in named if each.grad is not None}

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            found.update({"loss": logs["loss"]} if "loss" in logs else {})

    rollouts = loop.Rollouts(course, settings.train, settings.workflow)
    trainer = loop.trainer_of(course, settings.train, settings.workflow, rollouts)
    trainer.add_callback(Look())
    trainer.train()
    return rollouts.groups, list(trainer._logs["advantages"]), found["gradients"], found["loss"]


def advantages_by_hand(groups: Sequence[Sequence[float | None]], scale: str) -> list[float]:
    """What GRPO says, over the scored rollouts alone: score minus the group's mean, over a standard deviation."""
    every = [score for group in groups for score in group if score is not None]
    found = []
    for group in groups:
        scored = [score for score in group if score is not None]
        if len(scored) < 2:
            found += [0.0] * len(group)
            continue
        spread = {"group": statistics.stdev(scored), "batch": statistics.stdev(every), "none": 1.0 - 1e-4}[scale]
        mean = statistics.fmean(scored)
        found += [0.0 if score is None else (score - mean) / (spread + 1e-4) for score in group]
    return found


def log_probs(model: Any, rollout: Rollout, temperature: float) -> torch.Tensor:
    (turn,) = rollout.turns
    ids = torch.tensor([*turn.prompt_ids, *turn.completion_ids])
    logits = model(ids[None]).logits[0, len(turn.prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[len(turn.prompt_ids) :, None])[:, 0]


def loss_by_hand(model: Any, rollouts: Sequence[Rollout], advantages: Sequence[float], settings: Train) -> torch.Tensor:
    """Mean over the tokens of what is learnt from: kl_coef * KL to the base - advantage, weighed by the ratio."""
    total, tokens = torch.zeros(()), 0
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        policy = log_probs(model, rollout, settings.temperature)
        with torch.no_grad(), model.disable_adapter():
            base = log_probs(model, rollout, settings.temperature)
        kl = torch.exp(base - policy) - (base - policy) - 1
        ratio = torch.exp(policy - policy.detach())
        total = total + (ratio * (settings.kl_coef * kl - advantage)).sum()
        tokens += len(policy)
    return total / tokens


@pytest.mark.filterwarnings("ignore")  # of torch and TRL
@pytest.mark.parametrize(("scale", "micro_batch"), [("group", 16), ("group", 4), ("batch", 16), ("none", 16)])
def test_what_has_no_score_is_in_no_mean_no_deviation_and_no_gradient(
    scale: str, micro_batch: int, tmp_path: Path
) -> None:
    """Recomputed by hand from the rollouts that count; the last group has one score alone, and does not count."""
    scores = [[1.0, 0.0, None, 1.0], [0.25, None, None, 0.75], [0.5, 1.0, 0.0, 0.0], [None, 1.0, None, None]]
    course, settings = course_of(
        tmp_path,
        Grader(by_order(scores)),
        train__prompts_per_step=len(scores),
        train__micro_batch=micro_batch,
        train__max_steps=1,
        train__warmup_steps=1,
        train__max_grad_norm=1e9,
        train__max_replaced_groups=0,
        train__max_fault_share=1.0,
        train__scale_rewards=scale,
        train__temperature=0.7,
    )
    groups, advantages, gradients, loss = one_update(course, settings)
    assert [[one.sample.score for one in group] for group in groups] == scores
    expected = advantages_by_hand(scores, scale)
    assert advantages == pytest.approx(expected, abs=1e-5)
    counting = [
        (one, advantage)
        for one, advantage in zip(itertools.chain(*groups), expected, strict=True)
        if one.sample.score is not None and one not in groups[-1]
    ]
    by_hand = loss_by_hand(course.model, *zip(*counting, strict=True), settings.train)  # type: ignore[misc]
    course.model.zero_grad()
    by_hand.backward()
    assert loss == pytest.approx(by_hand.item(), abs=1e-4)
    assert gradients
    for name, weight in course.model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-3, atol=1e-5)


def rolled_out(folder: Path, scores: Sequence[Sequence[float | None]], step: int = 0, **changes: object) -> Any:
    """Rollouts of a step over the first two questions, and what TRL is given."""
    grader = Grader(by_order(scores))
    course, settings = course_of(folder, grader, **{"train__max_fault_share": 1.0, **changes})
    rollouts = loop.Rollouts(course, settings.train, settings.workflow)
    prompts = [loop.policy_messages(example, settings.workflow) for example in QUESTIONS[:2] for _ in range(GROUP)]
    trainer = SimpleNamespace(temperature=1.0, state=SimpleNamespace(global_step=step))
    return rollouts, rollouts(prompts, trainer), grader


GOOD: list[float | None] = [0.0, 1.0, 1.0, 0.0]
DEAD: list[float | None] = [None, None, 1.0, None]


def test_another_question_stands_in_for_a_group_with_fewer_than_two_scores(tmp_path: Path) -> None:
    rollouts, given, _ = rolled_out(tmp_path, [DEAD, GOOD, GOOD])
    stand_in, kept = (group[0].example for group in rollouts.groups)
    assert kept == QUESTIONS[1]
    assert stand_in in QUESTIONS[2:]
    assert [group[0].example for group in rollouts.replaced] == [QUESTIONS[0]]
    assert given["score"] == GOOD + GOOD
    assert given["prompt_ids"][0] == list(rollouts.groups[0][0].turns[0].prompt_ids)
    assert all(all(mask) for mask in given["env_mask"])


def test_what_stands_in_follows_from_seed_and_step(tmp_path: Path) -> None:
    chosen = [rolled_out(tmp_path, [DEAD, DEAD, GOOD, GOOD], step)[2].asked[2:] for step in (3, 3, 4)]
    assert chosen[0] == chosen[1]
    assert chosen[2] != chosen[0]


@pytest.mark.parametrize(("allowed", "replaced"), [(0, 0), (1, 1), (3, 3), (100, 4)])
def test_a_step_replaces_as_many_groups_as_are_allowed_and_there_are(
    allowed: int, replaced: int, tmp_path: Path
) -> None:
    """Where nothing stands in any more, the group stays, and no token of it is learnt from."""
    rollouts, given, grader = rolled_out(tmp_path, [GOOD] + [DEAD] * 5, train__max_replaced_groups=allowed)
    assert len(rollouts.replaced) == replaced
    assert len(set(grader.asked)) == len(grader.asked) == 2 + replaced
    assert given["score"] == GOOD + DEAD
    assert [any(mask) for mask in given["env_mask"]] == [True] * GROUP + [False] * GROUP


def test_too_many_rollouts_without_a_score_stop_the_run_before_others_are_asked(tmp_path: Path) -> None:
    said = r"^3 of 8 rollouts of a step have no score \(mostly no_verdict\).*When judge \(http://127\.0\.0\.1:9/v1\)"
    with pytest.raises(TooManyFaults, match=said):
        rolled_out(tmp_path, [GOOD, DEAD], train__max_fault_share=0.3)


def test_one_score_alone_has_no_advantage() -> None:
    assert [loop.has_advantages(group) for group in map(group_of, (GOOD, DEAD, [None] * 4))] == [True, False, False]


def group_of(scores: Sequence[float | None]) -> list[Rollout]:
    rows = [Sample("", "", "", "math", "", "", score, "", valid=True) for score in scores]
    return [Rollout(QUESTIONS[0], (), row, ()) for row in rows]
