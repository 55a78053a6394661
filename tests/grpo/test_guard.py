"""The guard on curves that are written out: what it takes for a collapse, and what it does not."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from gradeflow import params
from gradeflow.grpo.guard import Guard, Verdict

SETTINGS = params.load(Path(__file__).parents[2] / "params.yaml").train.guard.model_copy(
    update={"window": 3, "patience": 2, "reward_drop": 0.3}
)
WELL = {
    "reward": 0.5,
    "valid_share": 0.9,
    "entropy": 0.6,
    "kl": 0.01,
    "completion_tokens": 60.0,
    "dead_group_share": 0.3,
    "clip_share": 0.0,
}


def step(**changes: float) -> dict[str, float]:
    return WELL | changes


def said(guard: Guard, steps: Iterable[dict[str, float]]) -> list[Verdict]:
    return [guard.look(figures) for figures in steps]


def line(start: float, end: float, count: int) -> list[float]:
    return [start + (end - start) * place / (count - 1) for place in range(count)]


def test_a_policy_that_stays_as_it_is_is_healthy_once_in_a_window() -> None:
    assert said(Guard(SETTINGS), [step()] * 7) == [
        "watching",
        "watching",
        "healthy",
        "watching",
        "watching",
        "healthy",
        "watching",
    ]


def test_it_takes_longer_to_vouch_for_a_policy_whose_rollouts_come_later() -> None:
    """With staleness 2, the window after three steps was written by policies from before."""
    assert said(Guard(SETTINGS, staleness=2), [step()] * 5) == ["watching"] * 4 + ["healthy"]


BROKEN = [
    ("valid_share", 0.05),
    ("entropy", 5.0),
    ("entropy", 0.001),
    ("kl", 4.0),
    ("completion_tokens", 400.0),
    ("completion_tokens", 2.0),
    ("dead_group_share", 1.0),
    ("clip_share", 0.8),
]


@pytest.mark.parametrize(("figure", "value"), BROKEN)
def test_a_figure_far_from_what_it_was_and_a_reward_that_is_lost_are_a_collapse(figure: str, value: float) -> None:
    guard = Guard(SETTINGS)
    said(guard, [step()] * 6)
    found = said(guard, [step(reward=0.0, **{figure: value})] * 4)
    assert found[-1] == "collapsed"
    (sign,) = guard.signs()
    assert (sign.figure, sign.value, sign.baseline) == (figure, pytest.approx(value), pytest.approx(WELL[figure]))
    assert guard.reason() == f"reward 0 (it was 0.5); {sign}"


def test_the_reason_names_figure_value_limit_and_baseline() -> None:
    guard = Guard(SETTINGS)
    said(guard, [*[step()] * 3, *[step(reward=0.1, valid_share=0.1, entropy=3.0)] * 3])
    assert guard.reason() == (
        "reward 0.1 (it was 0.5); valid_share 0.1, below 0.45 (it was 0.9); entropy 3, above 1.8 (it was 0.6)"
    )


@pytest.mark.parametrize(("figure", "value"), BROKEN)
def test_while_the_reward_is_there_no_figure_is_a_collapse(figure: str, value: float) -> None:
    found = said(Guard(SETTINGS), [*[step()] * 6, *[step(reward=0.48, **{figure: value})] * 10])
    assert "collapsed" not in found


@pytest.mark.parametrize(("figure", "value"), BROKEN)
def test_nor_is_a_policy_vouched_for_whose_figures_are_off(figure: str, value: float) -> None:
    found = said(Guard(SETTINGS), [*[step()] * 6, *[step(reward=0.5, **{figure: value})] * 10])
    assert "healthy" not in found[-8:]


def test_a_reward_that_is_lost_alone_is_no_collapse_but_not_healthy_either() -> None:
    """The questions may be harder."""
    assert set(said(Guard(SETTINGS), [*[step()] * 6, *[step(reward=0.1)] * 10])[-10:]) == {"watching"}


def test_a_policy_that_learns_is_healthy_though_it_becomes_certain() -> None:
    """As in the demo: entropy falls to a twentieth and groups die while accuracy rises to 98 %."""
    rewards, entropies = line(0.45, 0.98, 45), line(0.6, 0.03, 45)
    dead, kl = line(0.3, 0.95, 45), line(0.0, 0.8, 45)
    found = said(
        Guard(SETTINGS),
        (
            step(reward=reward, entropy=entropy, dead_group_share=share, kl=nats)
            for reward, entropy, share, nats in zip(rewards, entropies, dead, kl, strict=True)
        ),
    )
    assert "collapsed" not in found
    assert found.count("healthy") == 15


def test_baselines_are_those_of_the_best_window() -> None:
    """A policy that learnt to write short workflows and then long ones again is measured by the short ones."""
    guard = Guard(SETTINGS)
    said(guard, [*[step()] * 3, *[step(reward=0.9, completion_tokens=15.0)] * 6])
    assert said(guard, [step(reward=0.5, completion_tokens=60.0)] * 4)[-1] == "collapsed"
    (sign,) = guard.signs()
    assert (sign.baseline, sign.limit) == (15.0, 45.0)


def test_one_bad_step_is_none() -> None:
    bad = step(reward=0.0, valid_share=0.2)
    assert "collapsed" not in said(Guard(SETTINGS), [*[step()] * 6, bad, *[step()] * 6])


def test_a_collapse_must_last_as_long_as_the_patience_says() -> None:
    bad = [step(reward=0.0, valid_share=0.0)] * 10
    for patience in (1, 2, 4):
        guard = Guard(SETTINGS.model_copy(update={"patience": patience}))
        found = said(guard, [*[step()] * 3, *bad])
        assert found.index("collapsed") == 3 + patience  # the first of them leaves two thirds


def test_small_groups_that_scatter_are_no_collapse() -> None:
    rewards = [0.5, 0.75, 0.25, 1.0, 0.5, 0.25, 0.75, 0.0, 0.25, 0.5] * 4
    shares = [1.0, 0.75, 0.75, 1.0, 0.75, 1.0, 0.75, 0.5, 0.75, 1.0] * 4
    steps = [step(reward=reward, valid_share=share) for reward, share in zip(rewards, shares, strict=True)]
    assert "collapsed" not in said(Guard(SETTINGS), steps)


def test_where_no_reward_was_ever_had_the_figures_decide() -> None:
    guard = Guard(SETTINGS)
    assert said(guard, [step(reward=0.0)] * 6)[-1] == "healthy"
    assert said(guard, [step(reward=0.0, valid_share=0.1)] * 4)[-1] == "collapsed"


def test_figures_that_are_not_there_say_nothing() -> None:
    """Without a KL coefficient no KL is measured."""
    bare = [{"reward": reward, "valid_share": share} for reward, share in [(0.5, 0.9)] * 3 + [(0.0, 0.0)] * 3]
    assert said(Guard(SETTINGS), bare)[-1] == "collapsed"


def test_after_going_back_a_whole_window_is_seen_before_anything_is_said() -> None:
    guard = Guard(SETTINGS)
    bad = step(reward=0.0, valid_share=0.0)
    assert said(guard, [*[step()] * 3, *[bad] * 3])[-1] == "collapsed"
    guard.went_back()
    assert said(guard, [step()] * 3) == ["watching", "watching", "healthy"]
    assert said(guard, [bad] * 3)[-1] == "collapsed"
    guard.went_back()
    assert said(guard, [bad] * 4) == ["watching", "watching", "watching", "collapsed"]


@pytest.mark.parametrize("cut", range(1, 14))
def test_an_interruption_changes_nothing(cut: int) -> None:
    steps: Sequence[dict[str, float]] = [
        *[step()] * 4,
        *[step(reward=0.8, entropy=0.3)] * 4,
        *[step(reward=0.1, entropy=2.0)] * 6,
    ]
    whole = Guard(SETTINGS)
    expected = said(whole, steps)
    assert expected[-1] == "collapsed"
    first, second = Guard(SETTINGS), Guard(SETTINGS)
    found = said(first, steps[:cut])
    second.restore(json.loads(json.dumps(first.state())))
    assert found + said(second, steps[cut:]) == expected
    assert second.reason() == whole.reason()
