import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import binom

from gradeflow import gate, params
from gradeflow.errors import PromotionError
from gradeflow.gate import Comparison, Decision, Look, inference, looks
from gradeflow.types import Sample

ROOT = Path(__file__).parents[1]
POLICY = params.load(ROOT / "params.yaml").promote
SURE = POLICY.model_copy(update={"minimum_effect": 0.0})


def compared(challenger: list[Sample], champion: list[Sample], task: str = "workflow") -> Comparison:
    return gate.compare(task, gate.pair(challenger, champion))


def decide(challenger: list[Sample], champion: list[Sample], policy: params.Promote = POLICY) -> Decision:
    return gate.decide([compared(challenger, champion)], policy)


def of(differences: list[float], task: str = "workflow") -> Comparison:
    """Such differences of scores, from a champion that is at one half."""
    low = np.full(len(differences), 0.5)
    return Comparison(task, low + np.array(differences), low, 0, len(differences))


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
    decision = decide(samples([1.0] * 60 + [0.0] * 40), samples([1.0] * 30 + [0.0] * 70))
    assert decision.promote
    assert (decision.first.n, decision.first.wins, decision.first.losses, decision.first.abstained) == (100, 30, 0, 0)
    assert decision.first.difference == pytest.approx(0.3)
    assert decision.first.interval.low < 0.3 < decision.first.interval.high
    assert decision.first.p_gain == pytest.approx(0.5**30)


def test_mcnemar_counts_only_the_questions_on_which_the_two_differ() -> None:
    challenger = [1.0] * 8 + [0.0] * 2 + [1.0] * 90
    champion = [0.0] * 8 + [1.0] * 2 + [1.0] * 90
    assert decide(samples(challenger), samples(champion)).first.p_gain == pytest.approx(56 / 1024)


@pytest.mark.parametrize("first", [[0.0, 1.0] * 50, [0.0, 0.5] * 50])
def test_an_equal_challenger_is_refused(first: list[float]) -> None:
    decision = decide(samples(first), samples(first))
    assert not decision.promote
    assert decision.first.p_gain == 1.0
    assert decision.first.difference == 0.0


def test_a_worse_challenger_has_a_p_value_near_one() -> None:
    worse = decide(samples([0.2, 0.4] * 40), samples([0.5, 0.6] * 40))
    assert worse.first.p_gain > 0.99
    assert not worse.promote


def test_scores_between_zero_and_one_are_tested_by_a_bootstrap() -> None:
    better = decide(samples([0.5, 0.7] * 40), samples([0.4, 0.5] * 40))
    assert better.promote
    assert better.first.p_gain == pytest.approx(1 / 10_001)


def test_a_gain_below_the_smallest_that_counts_is_refused_however_certain() -> None:
    gains = [1.0] * 10 + [0.0] * 990
    decision = decide(samples(gains), samples([0.0] * 1000))
    assert decision.first.p_gain < POLICY.alpha
    assert not decision.promote
    assert "below the least that counts" in decision.reasons[0]


def test_too_few_questions_decide_nothing() -> None:
    decision = decide(samples([1.0] * 20), samples([0.0] * 20))
    assert not decision.promote
    assert "20 questions are too few" in decision.reasons[0]


def test_pairs_without_a_score_are_left_out_and_counted() -> None:
    challenger, champion = [1.0] * 98 + [None, 1.0], [0.0] * 98 + [0.0, None]
    decision = decide(samples(challenger), samples(champion))
    assert (decision.first.n, decision.first.abstained, decision.first.mean_champion) == (98, 2, 0.0)
    assert decision.promote


def test_too_many_faults_decide_nothing() -> None:
    decision = decide(samples([1.0] * 90 + [None] * 10), samples([0.0] * 100))
    assert not decision.promote
    assert "10.0% of the pairs have no score" in decision.reasons[0]


def test_no_samples_at_all_decide_nothing() -> None:
    assert not decide([], []).promote


def test_several_answers_to_one_question_count_once() -> None:
    challenger = [*samples([1.0] * 30 + [0.0] * 30), *samples([1.0] * 30 + [0.0] * 30, repeat=1)]
    champion = [*samples([0.0] * 60), *samples([0.0] * 60, repeat=1)]
    decision = decide(challenger, champion)
    assert (decision.first.n, decision.first.wins) == (60, 30)
    assert decision.first.p_gain == pytest.approx(0.5**30)


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


def test_the_order_of_samples_does_not_matter() -> None:
    challenger, champion = samples([1.0, 0.5, 0.25] * 30), samples([0.5, 0.5, 0.0] * 30)
    assert decide(challenger[::-1], champion) == decide(challenger, champion[::-1])


@pytest.mark.parametrize("right_or_wrong", [True, False])
def test_equal_adapters_seem_to_differ_no_more_often_than_alpha(right_or_wrong: bool) -> None:
    random, tries = np.random.default_rng(5), 400 if right_or_wrong else 100
    drawn = random.random((tries, 2, 60))
    drawn = drawn.round() if right_or_wrong else drawn
    promoted = sum(inference.p_gain(first - second) <= SURE.alpha for first, second in drawn)
    assert promoted / tries <= SURE.alpha + 3 * (SURE.alpha * (1 - SURE.alpha) / tries) ** 0.5


def test_holm_steps_down_and_counts_what_else_could_have_been_chosen() -> None:
    assert inference.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert inference.holm([0.01], among=4) == pytest.approx([0.04])
    assert inference.holm([0.5, 0.9]) == [1.0, 1.0]


def test_one_of_several_targets_has_to_gain_and_none_may_lose() -> None:
    policy = POLICY.model_copy(update={"targets": ["workflow", "gsm8k"]})
    gains, still, falls = [1.0] * 20 + [0.0] * 380, [0.0] * 400, [-1.0] * 20 + [0.0] * 380
    assert gate.decide([of(gains), of(still, "gsm8k")], policy).promote
    assert gate.decide([of(still), of(gains, "gsm8k")], policy).promote
    lost = gate.decide([of(gains), of(falls, "gsm8k")], policy)
    assert lost.reasons == ("gsm8k: a loss of 2.0% or more is not ruled out: -5.0% over 400 questions, p = 1",)
    neither = gate.decide([of(still), of(still, "gsm8k")], policy)
    assert [reason.partition(":")[0] for reason in neither.reasons] == ["workflow", "workflow", "gsm8k", "gsm8k"]


def test_two_targets_share_one_alpha() -> None:
    policy = SURE.model_copy(update={"targets": ["workflow", "gsm8k"]})
    barely = of([1.0] * 5 + [0.0] * 395)
    assert gate.decide([barely], SURE).first.p_gain == pytest.approx(1 / 32)
    found = gate.decide([barely, of([0.0] * 400, "gsm8k")], policy)
    assert found.first.p_gain == pytest.approx(2 / 32)
    assert not found.promote


@pytest.mark.parametrize(("n", "passes"), [(20, False), (60, False), (400, True)])
def test_a_guard_passes_when_a_loss_of_its_margin_is_ruled_out(n: int, passes: bool) -> None:
    policy = POLICY.model_copy(update={"guards": {"humaneval": 0.02}, "minimum_n": 10})
    gains = of([1.0] * 30 + [0.0] * 70)
    found = gate.decide([gains, of([0.0] * n, "humaneval")], policy)
    assert found.promote == passes
    assert found.findings[1].role == "guard"
    if not passes:
        assert f"humaneval: a loss of 2.0% or more is not ruled out: +0.0% over {n} questions" in found.reasons[0]


@pytest.mark.parametrize(
    ("wins", "losses", "n"), [(0.1, 0.15, 100), (0.1, 0.15, 300), (0.0, 0.05, 45), (0.0, 0.02, 115), (0.02, 0.04, 200)]
)
def test_a_guard_that_lost_its_margin_passes_no_more_often_than_alpha(wins: float, losses: float, n: int) -> None:
    random, tries = np.random.default_rng(n), 500
    drawn = random.choice([-1.0, 0.0, 1.0], p=[losses, 1 - wins - losses, wins], size=(tries, n))
    passed = sum(inference.p_loss(differences, losses - wins) <= 0.05 for differences in drawn)
    assert passed / tries <= 0.05 + 3 * (0.05 * 0.95 / tries) ** 0.5


def test_the_exact_test_of_a_loss_is_the_binomial_one_where_nothing_can_be_won(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "WIN_SHARES", 1)
    differences = np.array([-1.0] * 3 + [0.0] * 197)
    assert inference.p_loss(differences, 0.05) == pytest.approx(binom.cdf(3, 200, 0.05) + inference.LEFT_OUT)


def test_a_score_that_is_no_number_is_named() -> None:
    with pytest.raises(PromotionError, match="question example-0: a score is nan"):
        compared(samples([float("nan")]), samples([1.0]))


def test_a_task_that_was_not_evaluated_is_named() -> None:
    policy = POLICY.model_copy(update={"guards": {"humaneval": 0.02}})
    with pytest.raises(PromotionError, match=r"not evaluated: humaneval.*there are workflow"):
        gate.decide([of([1.0])], policy)


def test_the_detectable_gain_is_shown_as_often_as_the_policy_says() -> None:
    random, n, tries = np.random.default_rng(2), 400, 1000
    still = random.choice([-1.0, 0.0, 1.0], p=[0.1, 0.8, 0.1], size=(tries, n))
    gain = float(np.mean([inference.detectable(one, 0.05, 0.8) for one in still]))
    better = random.choice([-1.0, 0.0, 1.0], p=[0.1 - gain / 2, 0.8, 0.1 + gain / 2], size=(tries, n))
    shown = np.mean([inference.p_gain(one) <= 0.05 for one in better])
    assert shown == pytest.approx(0.8, abs=0.06)  # McNemar's exact test is a little less sharp


def test_all_looks_together_err_as_often_as_one() -> None:
    assert gate.levels((1.0,), 0.05) == pytest.approx((0.05,))
    shares, random = looks.even(5), np.random.default_rng(1)
    levels = gate.levels(shares, 0.05)
    assert list(levels) == sorted(levels)
    path = np.cumsum(random.normal(size=(200_000, 5)) * 0.2**0.5, axis=1) / np.sqrt(shares)
    crossed = (ndtr(-path) <= levels).any(axis=1).mean()
    assert crossed == pytest.approx(0.05, abs=3 * (0.05 * 0.95 / 200_000) ** 0.5)


def test_an_evaluation_stops_for_a_clear_gain_goes_on_in_doubt_and_stops_against_a_clear_lack_of_one() -> None:
    policy = POLICY.model_copy(update={"minimum_effect": 0.1})
    first = Look(looks.even(4), 0)
    assert gate.decided(of([1.0] * 40 + [0.0] * 60), policy, first) == "for"
    assert gate.decided(of([1.0] * 12 + [-1.0] * 4 + [0.0] * 84), policy, first) is None
    assert gate.decided(of([1.0] * 10 + [-1.0] * 30 + [0.0] * 60), policy, first) == "against"
    assert gate.decided(of([1.0] * 12 + [-1.0] * 4 + [0.0] * 84), policy, Look(looks.even(4), 3)) == "against"
    assert gate.decided(of([1.0] * 40), policy, first) is None, "fewer than the policy asks for"


def test_looking_often_promotes_equal_adapters_no_more_often_than_alpha() -> None:
    random, tries, shares = np.random.default_rng(3), 1000, looks.even(5)
    promoted = 0
    for differences in random.choice([-1.0, 0.0, 1.0], p=[0.2, 0.6, 0.2], size=(tries, 300)):
        found = (
            gate.decided(of(list(differences[: round(300 * share)])), SURE, Look(shares, at))
            for at, share in enumerate(shares)
        )
        promoted += next(one for one in found if one) == "for"
    assert promoted / tries <= SURE.alpha + 3 * (SURE.alpha * (1 - SURE.alpha) / tries) ** 0.5


def test_a_gain_that_is_shown_at_an_early_look_has_to_pass_that_looks_level() -> None:
    barely = of([1.0] * 6 + [0.0] * 94)
    assert gate.decide([barely], SURE).promote
    early = gate.decide([barely], SURE, look=Look(looks.even(4), 1))
    assert not early.promote
    assert early.level == pytest.approx(gate.levels(looks.even(4), 0.05)[1])


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


def test_many_distinct_differences_are_resampled_in_steps() -> None:
    differences = np.random.default_rng(4).normal(0.01, 0.3, 5000)
    low, high = gate.bootstrap(differences)
    half = 1.96 * differences.std() / len(differences) ** 0.5
    assert low == pytest.approx(differences.mean() - half, abs=0.0005)
    assert high == pytest.approx(differences.mean() + half, abs=0.0005)


def test_differences_are_grouped_by_kind() -> None:
    first = [replace(one, kind="text") if number else one for number, one in enumerate(samples([1.0, 0.5, None]))]
    found = gate.by_kind(gate.pair(first, samples([0.0, 0.5, 1.0])))
    assert {kind: list(values) for kind, values in found.items()} == {"math": [1.0], "text": [0.0]}


def test_the_saved_samples_of_the_documentation_say_what_it_says_of_them() -> None:
    page = (ROOT / "docs/promotion.md").read_text()
    example = r"```sh\n(python perf/gate.py --samples [^`]+)```\n\n```text\n([^`]+)```"
    ((command, told),) = re.findall(example, page)
    program, *arguments = command.split()
    assert program == "python"
    said = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout == told


def test_scores_that_are_often_a_little_better_and_seldom_much_worse_pass_no_more_often_than_alpha() -> None:
    """The same on average; a bootstrap of so few questions often has not met the loss, least of all at early looks."""
    shares, passed, tries = looks.even(5), 0, 600
    for seed in range(tries):
        differences = np.where(np.random.default_rng(seed).random(250) < 0.9, 0.05, -0.45)
        for at, share in enumerate(shares):
            part = of(list(differences[: round(250 * share)]))
            if said := gate.decided(part, SURE, Look(shares, at)):
                passed += said == "for"
                break
    assert passed / tries <= 0.05 + 3 * (0.05 * 0.95 / tries) ** 0.5
