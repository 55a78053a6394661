from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradeflow import gate, params
from gradeflow.errors import PromotionError
from gradeflow.types import Sample

POLICY = params.load(Path(__file__).parents[1] / "params.yaml").promote


def samples(scores: list[float | None], *, repeat: int = 0) -> list[Sample]:
    return [
        Sample(
            f"example-{number}",
            f"digest-{number}",
            "word_problems",
            "math",
            "code",
            "1",
            score,
            "number",
            True,
            fault=None if score is not None else "judge_down",
            repeat=repeat,
        )
        for number, score in enumerate(scores)
    ]


def test_a_clearly_better_challenger_is_promoted() -> None:
    decision = gate.decide(samples([1.0] * 60 + [0.0] * 40), samples([1.0] * 30 + [0.0] * 70), POLICY)
    assert decision.promote
    assert (decision.n, decision.wins, decision.losses, decision.abstained) == (100, 30, 0, 0)
    assert decision.difference == pytest.approx(0.3)
    assert decision.interval.low < 0.3 < decision.interval.high
    assert decision.p_value == pytest.approx(0.5**30)


def test_mcnemar_counts_only_the_questions_on_which_the_two_differ() -> None:
    challenger = [1.0] * 8 + [0.0] * 2 + [1.0] * 90
    champion = [0.0] * 8 + [1.0] * 2 + [1.0] * 90
    assert gate.decide(samples(challenger), samples(champion), POLICY).p_value == pytest.approx(56 / 1024)


@pytest.mark.parametrize("first", [[0.0, 1.0] * 50, [0.0, 0.5] * 50])
def test_an_equal_challenger_is_refused(first: list[float]) -> None:
    decision = gate.decide(samples(first), samples(first), POLICY)
    assert not decision.promote
    assert decision.p_value == 1.0
    assert decision.difference == 0.0


def test_a_worse_challenger_has_a_p_value_near_one() -> None:
    worse = gate.decide(samples([0.2, 0.4] * 40), samples([0.5, 0.6] * 40), POLICY)
    assert worse.p_value > 0.99
    assert not worse.promote


def test_scores_between_zero_and_one_are_tested_by_flipping_signs() -> None:
    better = gate.decide(samples([0.5, 0.7] * 40), samples([0.4, 0.5] * 40), POLICY)
    assert better.promote
    assert better.p_value == pytest.approx(1 / 10_001)


def test_a_gain_below_the_smallest_that_counts_is_refused_however_certain() -> None:
    gains = [1.0] * 10 + [0.0] * 990
    decision = gate.decide(samples(gains), samples([0.0] * 1000), POLICY)
    assert decision.p_value < POLICY.alpha
    assert not decision.promote
    assert "below the least that counts" in decision.reasons[0]


def test_too_few_questions_decide_nothing() -> None:
    decision = gate.decide(samples([1.0] * 20), samples([0.0] * 20), POLICY)
    assert not decision.promote
    assert "20 questions are too few" in decision.reasons[0]


def test_pairs_without_a_score_are_left_out_and_counted() -> None:
    challenger, champion = [1.0] * 98 + [None, 1.0], [0.0] * 98 + [0.0, None]
    decision = gate.decide(samples(challenger), samples(champion), POLICY)
    assert (decision.n, decision.abstained, decision.mean_champion) == (98, 2, 0.0)
    assert decision.promote


def test_too_many_faults_decide_nothing() -> None:
    decision = gate.decide(samples([1.0] * 90 + [None] * 10), samples([0.0] * 100), POLICY)
    assert not decision.promote
    assert "10.0% of the pairs have no score" in decision.reasons[0]


def test_no_samples_at_all_decide_nothing() -> None:
    assert not gate.decide([], [], POLICY).promote


def test_several_answers_to_one_question_count_once() -> None:
    challenger = [*samples([1.0] * 30 + [0.0] * 30), *samples([1.0] * 30 + [0.0] * 30, repeat=1)]
    champion = [*samples([0.0] * 60), *samples([0.0] * 60, repeat=1)]
    decision = gate.decide(challenger, champion, POLICY)
    assert (decision.n, decision.wins) == (60, 30)
    assert decision.p_value == pytest.approx(0.5**30)


def test_other_questions_are_refused() -> None:
    with pytest.raises(PromotionError, match="answered different questions: 60 and 50, 10 by one alone"):
        gate.pair(samples([1.0] * 60), samples([1.0] * 50))


def test_a_changed_example_is_refused() -> None:
    changed = [replace(one, example_digest="other") for one in samples([1.0])]
    with pytest.raises(PromotionError, match="example-0 has changed"):
        gate.pair(samples([1.0]), changed)


def test_an_example_given_twice_is_refused() -> None:
    with pytest.raises(PromotionError, match="the champion's samples hold 1 examples more than once"):
        gate.pair(samples([1.0]), samples([1.0]) * 2)


def test_different_scorers_are_refused() -> None:
    with pytest.raises(PromotionError, match="challenger by a/1, champion by a/2"):
        gate.decide(samples([1.0]), samples([0.0]), POLICY, scorers=("a/1", "a/2"))


def test_the_order_of_samples_does_not_matter() -> None:
    challenger, champion = samples([1.0, 0.5, 0.25] * 30), samples([0.5, 0.5, 0.0] * 30)
    assert gate.decide(challenger[::-1], champion, POLICY) == gate.decide(challenger, champion[::-1], POLICY)


def test_equal_adapters_are_promoted_no_more_often_than_alpha() -> None:
    random = np.random.default_rng(5)
    policy = POLICY.model_copy(update={"minimum_effect": 0.0})
    tries = 400
    promoted = sum(
        gate.decide(samples(list(first)), samples(list(second)), policy).promote
        for first, second in random.integers(0, 2, (tries, 2, 60)).astype(float)
    )
    assert promoted / tries <= policy.alpha + 3 * (policy.alpha * (1 - policy.alpha) / tries) ** 0.5


def test_wilsons_interval_agrees_with_the_published_example() -> None:
    low, high = gate.interval([1.0] * 81 + [0.0] * 182)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert gate.interval([]) == (0.0, 1.0)
    assert gate.interval([1.0] * 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_differences() -> None:
    differences = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], size=2000, p=[0.1, 0.6, 0.3])
    low, high = gate.bootstrap(differences)
    half = 1.96 * differences.std() / len(differences) ** 0.5
    assert low == pytest.approx(differences.mean() - half, abs=0.003)
    assert high == pytest.approx(differences.mean() + half, abs=0.003)


def test_differences_are_grouped_by_kind() -> None:
    first = [replace(one, kind="text") if number else one for number, one in enumerate(samples([1.0, 0.5, None]))]
    found = gate.by_kind(gate.pair(first, samples([0.0, 0.5, 1.0])))
    assert {kind: list(values) for kind, values in found.items()} == {"math": [1.0], "text": [0.0]}
