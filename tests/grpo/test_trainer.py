"""TRL's own trainer on a tiny base, against what GRPO says, computed by hand."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gradeflow import params
from gradeflow.errors import SettingsError
from gradeflow.grpo import checkpoint, log_probs, loop, trainer
from gradeflow.grpo.rollouts import Batch, different_scores
from gradeflow.params import Train
from gradeflow.types import Rollout
from support import courses, tiny
from support.courses import Grader, Reader, Small, by_order

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and TRL


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Train:
    return tiny.settings(tmp_path_factory.mktemp("base")).train


def changed(settings: Train, **values: object) -> Train:
    return settings.model_copy(update=values)


def test_the_temperature_is_constant_without_a_schedule(settings: Train) -> None:
    assert trainer.temperature_at(1000, changed(settings, temperature=0.7, temperature_steps=0)) == 0.7


@pytest.mark.parametrize(("step", "expected"), [(0, 0.3), (50, 0.55), (100, 0.8), (500, 0.8)])
def test_the_temperature_follows_its_schedule(settings: Train, step: int, expected: float) -> None:
    schedule = changed(settings, temperature=0.3, temperature_end=0.8, temperature_steps=100)
    assert trainer.temperature_at(step, schedule) == pytest.approx(expected)


@pytest.mark.parametrize("micro_batch", [1, 5, 32, 64, 1000])
def test_one_update_covers_whole_groups_whatever_the_micro_batch(
    settings: Train, micro_batch: int, tmp_path: Path
) -> None:
    chosen = changed(settings, prompts_per_step=6, group_size=4, micro_batch=micro_batch)
    config = trainer.configure(chosen, tmp_path)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 24
    assert config.per_device_train_batch_size <= max(micro_batch, 1)
    assert config.generation_batch_size == 24


def test_no_checkpoint_comes_between_two_updates_on_the_same_rollouts() -> None:
    with pytest.raises(SettingsError, match=r"eval_every is 5, not a multiple of ppo_epochs = 2"):
        params.load(tiny.ROOT / "params.yaml", {"train.eval_every": "5", "train.ppo_epochs": "2"})


def test_parts_without_anything_to_learn_are_no_part_of_the_figures(tmp_path: Path) -> None:
    """Without a KL three groups of four teach nothing and are left out; parts stay as many."""
    scores = by_order([[0.0, 1.0, 1.0, 0.0], *[[1.0] * 4] * 3])
    found = []
    for micro in (16, 1):
        changes = {"train__prompts_per_step": 4, "train__kl_coef": 0.0, "train__micro_batch": micro}
        with courses.course(tmp_path, Grader(scores), **{**ONE_STEP, **changes}, run=f"run-{micro}") as small:
            (update,) = Updates(small).found
        found.append(update["logs"])
        scores = by_order([[0.0, 1.0, 1.0, 0.0], *[[1.0] * 4] * 3])
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-3)
    assert found[0]["entropy"] == pytest.approx(found[1]["entropy"], rel=0.1)


def test_a_step_without_anything_to_learn_has_no_entropy(tmp_path: Path) -> None:
    changes = {"train__kl_coef": 0.0, "train__max_replaced_groups": 0}
    with courses.course(tmp_path, Grader(lambda _: [1.0] * 4), **{**ONE_STEP, **changes}) as small:
        (update,) = Updates(small).found
    assert "entropy" not in update["logs"]
    assert update["logs"]["grad_norm"] == 0


class Updates:
    """Gradients, loss and batch of each update of a course, and the weights from before it."""

    def __init__(self, small: Small, stop: int = 0) -> None:
        from transformers import TrainerCallback

        self.found: list[dict[str, Any]] = []
        course, settings = small.course, small.settings
        rollouts = loop.rollouts_of(course, settings.train)
        last = checkpoint.newest(course.folder)
        if last is not None:
            rollouts.restore(checkpoint.state_of(last))
        made = trainer.make(
            course.model, course.tokenizer, rollouts, settings.train, course.folder, rollouts.state, lambda _: None
        )
        updates = self

        class Look(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                weights = {name: each.detach().clone() for name, each in course.model.named_parameters()}
                updates.found.append({"weights": weights})

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                named = course.model.named_parameters()
                gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}
                updates.found[-1] |= {"gradients": gradients, "batch": made.batch}

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                updates.found[-1].update({"logs": logs} if "loss" in logs else {})

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop |= state.global_step == stop

        made.add_callback(Look())
        made.train(resume_from_checkpoint=None if last is None else str(last))


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


def log_probs_by_hand(model: Any, rollout: Rollout) -> torch.Tensor:
    (turn,) = rollout.turns
    ids = torch.tensor([*turn.prompt_ids, *turn.completion_ids])
    logits = model(ids[None]).logits[0, len(turn.prompt_ids) - 1 : -1] / rollout.temperature
    return logits.log_softmax(-1).gather(1, ids[len(turn.prompt_ids) :, None])[:, 0]


def loss_by_hand(
    model: Any, rollouts: Sequence[Rollout], advantages: Sequence[float], settings: Train, *, on_policy: bool = True
) -> torch.Tensor:
    """Mean over the tokens of what is learnt from: kl_coef * weighed KL to the base - clipped, weighed advantage."""
    total, tokens = torch.zeros(()), 0
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        policy = log_probs_by_hand(model, rollout)
        with torch.no_grad(), model.disable_adapter():
            base = log_probs_by_hand(model, rollout)
        kl = torch.exp(base - policy) - (base - policy) - 1
        wrote = policy.detach() if on_policy else torch.tensor(rollout.turns[0].log_probs)
        ratio = torch.exp(policy - wrote)
        clipped = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range_high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        total = total + (settings.kl_coef * ratio * kl - gain).sum()
        tokens += len(policy)
    return total / tokens


def assert_by_hand(small: Small, update: dict[str, Any], *, on_policy: bool = True) -> None:
    """Loss and gradients of an update, recomputed from the rollouts that count, with the weights from before it."""
    model, settings, batch = small.course.model, small.settings.train, update["batch"]
    scores = [[one.sample.score for one in group] for group in batch.groups]
    counting = [
        (one, advantage)
        for one, advantage in zip(batch.rollouts, advantages_by_hand(scores, settings.scale_rewards), strict=True)
        if one.sample.score is not None and sum(other is not None for other in scores_beside(batch, one)) > 1
    ]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(update["weights"][name])
    model.eval()
    model.zero_grad()
    by_hand = loss_by_hand(model, *zip(*counting, strict=True), settings, on_policy=on_policy)  # type: ignore[misc]
    by_hand.backward()
    assert update["logs"]["loss"] == pytest.approx(by_hand.item(), abs=1e-4)
    assert update["gradients"]
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(update["gradients"][name], weight.grad, rtol=1e-3, atol=1e-5)


def scores_beside(batch: Batch, rollout: Rollout) -> list[float | None]:
    (group,) = (group for group in batch.groups if rollout in group)
    return [one.sample.score for one in group]


ONE_STEP = {
    "train__prompts_per_step": 4,
    "train__micro_batch": 16,
    "train__max_steps": 1,
    "train__warmup_steps": 0,
    "train__max_grad_norm": 1e9,
    "train__max_replaced_groups": 0,
}
SCORES = [[1.0, 0.0, None, 1.0], [0.25, None, None, 0.75], [0.5, 1.0, 0.0, 0.0], [None, 1.0, None, None]]


@pytest.mark.parametrize(("scale", "micro_batch"), [("group", 16), ("group", 4), ("batch", 16), ("none", 16)])
def test_what_has_no_score_is_in_no_mean_no_deviation_and_no_gradient(
    scale: str, micro_batch: int, tmp_path: Path
) -> None:
    """The last group has one score alone, and does not count."""
    steps = ONE_STEP | {
        "train__scale_rewards": scale,
        "train__micro_batch": micro_batch,
        "train__temperature": 0.7,
        "train__temperature_end": 0.7,
    }
    with courses.course(tmp_path, Grader(by_order(SCORES)), **steps) as small:
        (update,) = Updates(small).found
        assert_by_hand(small, update)


def test_each_rollout_is_measured_at_the_temperature_that_it_was_sampled_at(tmp_path: Path) -> None:
    schedule = {"train__temperature": 0.5, "train__temperature_end": 1.5, "train__temperature_steps": 2}
    steps = ONE_STEP | schedule | {"train__max_steps": 3}
    with courses.course(tmp_path, Grader(lambda _: [0.0, 1.0, 1.0, 0.0]), **steps) as small:
        updates = Updates(small).found
        assert [update["batch"].rollouts[0].temperature for update in updates] == [0.5, 1.0, 1.5]
        for update in updates:
            assert_by_hand(small, update)


def test_what_an_older_policy_wrote_is_weighed_by_the_probabilities_it_had_then(tmp_path: Path) -> None:
    """Staleness 2, with a temperature that changes and a learning rate at which ratios leave the clip range."""
    steps = ONE_STEP | {
        "train__max_steps": 4,
        "train__staleness": 2,
        "train__learning_rate": 0.05,
        "train__temperature": 0.8,
        "train__temperature_end": 1.2,
        "train__temperature_steps": 3,
    }
    with courses.course(tmp_path, Grader(lambda _: [0.0, 1.0, 1.0, 0.0]), **steps) as small:
        updates = Updates(small).found
        versions = [sorted({one.version for one in update["batch"].rollouts}) for update in updates]
        assert versions == [[0], [0], [0], [1]]
        for update in updates:
            assert_by_hand(small, update, on_policy=False)
        assert updates[2]["logs"]["clip_ratio/region_mean"] > 0


def test_the_log_probabilities_kept_at_sampling_are_those_of_the_policy_that_sampled(tmp_path: Path) -> None:
    changes = {**ONE_STEP, "train__temperature": 0.7, "train__staleness": 1}
    with courses.course(tmp_path, Grader(lambda _: SCORES[0]), **changes) as small:
        (update,) = Updates(small).found
        with torch.no_grad():
            for name, weight in small.course.model.named_parameters():
                weight.copy_(update["weights"][name])
            small.course.model.eval()
            for one in update["batch"].rollouts:
                again = log_probs_by_hand(small.course.model, one)
                torch.testing.assert_close(torch.tensor(one.turns[0].log_probs), again, rtol=1e-3, atol=1e-4)


def test_two_epochs_learn_twice_from_the_same_rollouts(tmp_path: Path) -> None:
    steps = ONE_STEP | {"train__max_steps": 4, "train__ppo_epochs": 2, "train__eval_every": 4}
    with courses.course(tmp_path, Grader(lambda _: [0.0, 1.0, 1.0, 0.0]), **steps) as small:
        updates = Updates(small).found
        batches = [update["batch"] for update in updates]
        assert batches[0] is batches[1]
        assert batches[1] is not batches[2] is batches[3]
        for update in updates:
            assert_by_hand(small, update, on_policy=False)


def test_groups_that_teach_nothing_are_left_out_without_a_kl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    found = log_probs.log_probs

    def counted(model: Any, ids: torch.Tensor, *others: Any) -> Any:
        read.append(len(ids))
        return found(model, ids, *others)

    monkeypatch.setattr(trainer, "log_probs", counted)
    dead = [1.0, 1.0, 1.0, 1.0]
    scores = by_order([dead, SCORES[2], dead, dead])
    with courses.course(tmp_path, Grader(scores), **ONE_STEP, train__kl_coef=0.0) as small:
        (update,) = Updates(small).found
        assert sorted(len(different_scores(group)) for group in update["batch"].groups) == [1, 1, 1, 3]
        assert read == [4]
        assert_by_hand(small, update)


def test_a_step_without_anything_to_learn_moves_nothing(tmp_path: Path) -> None:
    with courses.course(tmp_path, Grader(lambda _: [1.0]), **ONE_STEP, train__kl_coef=0.0) as small:
        (update,) = Updates(small).found
        assert all(torch.count_nonzero(each) == 0 for each in update["gradients"].values())
        for name, weight in small.course.model.named_parameters():
            assert torch.equal(weight, update["weights"][name])


@pytest.mark.parametrize("kl_coef", [0.0, 0.15])
def test_the_base_is_bit_for_bit_what_it_was(kl_coef: float, tmp_path: Path) -> None:
    steps = ONE_STEP | {"train__max_steps": 20, "train__learning_rate": 0.05, "train__prompts_per_step": 1}
    with courses.course(tmp_path, Grader(lambda _: [0.0, 1.0]), **steps, train__kl_coef=kl_coef) as small:
        updates = Updates(small).found
        first, last = updates[0]["weights"], dict(small.course.model.named_parameters())
        frozen = [name for name in first if "lora" not in name]
        assert frozen
        assert all(torch.equal(first[name], last[name]) for name in frozen)
        assert not any(torch.equal(first[name], last[name]) for name in first if "lora_B" in name)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_that_goes_on_ends_as_one_without_an_interruption(staleness: int, tmp_path: Path) -> None:
    """It learns from the same rollouts, and its adapter is the same to the last bit."""
    steps = ONE_STEP | {
        "train__max_steps": 4,
        "train__eval_every": 2,
        "train__warmup_steps": 2,
        "train__staleness": staleness,
    }
    ends, asked = [], []
    for name, stops in (("whole", [4]), ("halves", [2, 4])):
        found: list[dict[str, Any]] = []
        for stop in stops:
            with courses.course(tmp_path, Reader(), run=name, **steps) as small:
                found += Updates(small, stop).found
        rollouts = [one for update in found for one in update["batch"].rollouts]
        asked.append([(one.example.id, one.version, one.turns, one.sample) for one in rollouts])
        ends.append({name: each for name, each in small.course.model.named_parameters() if "lora" in name})
    assert asked[0] == asked[1]
    assert all(torch.equal(each, ends[1][name]) for name, each in ends[0].items())


def test_a_fresh_adapter_changes_nothing(settings: Train, tmp_path: Path) -> None:
    from gradeflow import models

    base, _ = models.load(tiny.settings(tmp_path).base)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        before = base(ids).logits
        after = loop.attach_adapter(base, settings.lora)(ids).logits
    assert torch.equal(before, after)


def test_advantages_are_those_of_trl(tmp_path: Path) -> None:
    from gradeflow.grpo.advantages import advantages

    for scale in ("group", "batch", "none"):
        found = [0.0 if each is None else each for group in advantages(SCORES, scale) for each in group]  # type: ignore[arg-type]
        assert found == pytest.approx(advantages_by_hand(SCORES, scale), abs=1e-9)
    assert list(itertools.chain(*advantages([[1.0, None]], "group"))) == [None, None]
