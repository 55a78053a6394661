import asyncio
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradeflow import audit, params, sources
from gradeflow.audit import Alarm, Case, Judged, figures, kappa, label, objections
from gradeflow.errors import AuditError, ProviderError
from gradeflow.grpo.environment import WorkflowEnvironment
from gradeflow.judge import Judge
from gradeflow.llm import ScriptedClient
from gradeflow.prompt import Message
from gradeflow.scorer import last_number, normalise, plain_number
from gradeflow.types import Example, Rollout, Sample
from support import tiny

SETTINGS = params.load(tiny.ROOT / "params.yaml").judge
EXAMPLES = [
    example
    for name in ("word_problems", "turns", "places", "functions")
    for example in itertools.islice(sources.made(name, "test", 0), 40)
]
CASES = audit.cases(EXAMPLES, 12, 0)
YES, NO = "<true_false>True</true_false>", "<true_false>False</true_false>"


def some(kind: str, group: str, *, correct: bool) -> list[Case]:
    return [case for case in CASES if (case.kind, case.group, case.correct) == (kind, group, correct)]


def test_the_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    assert audit.cases(EXAMPLES, 12, 0) == CASES
    assert audit.cases(EXAMPLES, 12, 1) != CASES


@pytest.mark.parametrize("kind", ["math", "choice", "text"])
def test_each_kind_has_right_and_wrong_answers_in_all_variants_and_every_canary(kind: str) -> None:
    found = Counter((case.group, case.correct) for case in CASES if case.kind == kind)
    assert found == {
        **{(group, correct): 12 for group in ("plain", "long", "swapped") for correct in (True, False)},
        **{("again", correct): 24 for correct in (True, False)},
        ("canary", False): audit.TIMES * (len(audit.CANARIES) + 2),
    }


def test_code_is_left_out_since_its_tests_decide() -> None:
    assert {case.kind for case in CASES} == {"math", "choice", "text"}


def test_right_numbers_are_equal_to_the_reference_however_they_are_written() -> None:
    written = some("math", "plain", correct=True)
    assert all(last_number(case.answer) == plain_number(case.reference) for case in written)
    assert len({case.answer.replace(case.reference, "N") for case in written}) >= 6
    assert all(
        last_number(case.answer) != plain_number(case.reference) for case in some("math", "plain", correct=False)
    )


def test_wrong_texts_are_wrong_for_certain_and_right_ones_name_the_reference() -> None:
    for case in some("text", "plain", correct=True):
        assert normalise(case.reference) in normalise(case.answer)
    for case in some("text", "plain", correct=False):
        assert normalise(case.reference) not in normalise(case.answer)


def test_variants_ask_about_the_same_answer_in_another_way() -> None:
    plain = {case.item: case for case in CASES if case.group == "plain"}
    for case in CASES:
        if case.group == "long":
            assert plain[case.item].answer in case.answer
            assert len(case.answer) > 500
        if case.group == "swapped":
            assert (case.reference, case.answer) == (plain[case.item].answer, plain[case.item].reference)
        if case.group == "again":
            assert case.seed in audit.REPEATS


def test_one_canary_imitates_the_end_of_the_prompt_and_one_repeats_the_question() -> None:
    *_, repeated, breakout = some("text", "canary", correct=False)
    assert repeated.answer == repeated.question
    assert " >>>\n\nReply as " in breakout.answer


def judge(replies: Callable[[Sequence[Message]], str] | list[str | Exception], **changes: object) -> Judge:
    return Judge([ScriptedClient(replies, model="stand-in")], SETTINGS.model_copy(update=changes))


def test_a_fault_is_no_verdict_and_keeps_its_cause() -> None:
    case = CASES[0]
    assert asyncio.run(audit.ask(judge([YES]), case)).verdict is True
    down = asyncio.run(audit.ask(judge([ProviderError("gone", cause="unreachable")]), case))
    assert (down.verdict, down.fault) == (None, "unreachable")
    silent = asyncio.run(audit.ask(judge(["hm", "hm"]), case))
    assert (silent.verdict, silent.fault) == (None, "no_verdict")


def judged(*verdicts: tuple[bool, bool | None], group: str = "plain", fault: str = "") -> list[Judged]:
    """Pairs of a label and what the judge said."""
    cases = (replace(CASES[0], item=f"{n}", group=group, correct=label) for n, (label, _) in enumerate(verdicts))
    return [
        Judged(case, said, fault="" if said is not None else fault)
        for case, (_, said) in zip(cases, verdicts, strict=True)
    ]


def test_both_kinds_of_error_are_told_apart_with_their_bounds() -> None:
    found = figures(judged(*[(False, True)] * 2, *[(False, False)] * 6, (True, False), (True, True)))
    assert (found.accuracy.share, found.accuracy.n) == (0.7, 10)
    assert (found.false_positives.share, found.false_positives.n) == (0.25, 8)
    assert found.false_positives.low == pytest.approx(0.0715, abs=1e-3)
    assert found.false_positives.high == pytest.approx(0.5907, abs=1e-3)
    assert found.false_negatives.share == 0.5


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15, 0.4),
        ([(True, True), (False, False)], 1.0),
        ([(True, True), (False, True)], 0.0),
        ([(True, False), (False, True)], -1.0),
    ],
)
def test_kappa_is_agreement_beyond_chance(pairs: list[tuple[bool, bool]], expected: float) -> None:
    assert kappa(pairs) == pytest.approx(expected)


def test_where_chance_brings_all_agreement_kappa_says_nothing_and_is_no_metric() -> None:
    assert math.isnan(kappa([(True, True)]))
    assert math.isnan(kappa([]))
    assert "kappa" not in figures(judged((True, True))).metrics()


def test_faults_are_counted_apart_and_are_never_a_verdict() -> None:
    found = figures(judged((True, True), (False, None), fault="timeout") + judged((True, None), fault="no_verdict"))
    assert (found.accuracy.n, found.false_positives.n) == (1, 0)
    assert (found.no_verdict.share, found.faults) == (1 / 3, {"timeout": 1})
    assert objections(found, SETTINGS, 0.2) == [
        "leaves 67% (21-94) without a verdict; train.max_fault_share is 20%",
    ]


def test_agreement_compares_a_variant_with_its_plain_case_and_what_is_asked_again_counts_for_nothing_else() -> None:
    plain = judged((True, True), (True, True), (True, None))
    found = figures([*plain, *judged((True, True), (True, False), (True, True), group="again")])
    assert (found.agreement["again"].share, found.agreement["again"].n) == (0.5, 2)
    assert found.accuracy.n == 2


def test_a_canary_that_passes_and_false_positives_beyond_chance_are_objections() -> None:
    assert objections(figures(judged(*[(False, False)] * 20)), SETTINGS, 0.2) == []
    passing = [Judged(replace(CASES[0], group="canary", answer=":", correct=False), verdict=True)]
    assert objections(figures(judged(*[(False, False)] * 20) + passing), SETTINGS, 0.2) == [
        "calls the canary ':' right (1 of 3)"
    ]
    assert objections(figures(judged((False, True), (False, False), (False, False))), SETTINGS, 0.2) == []
    lenient = objections(figures(judged(*[(False, True)] * 9, *[(False, False)] * 11)), SETTINGS, 0.2)
    assert lenient == ["calls 45% (26-66) of the wrong answers right; judge.max_false_positives is 20%"]


def test_a_share_is_drawn_by_digest_and_is_the_same_each_time() -> None:
    drawn = [number for number in range(10_000) if audit.is_drawn(0.05, 7, "id", f"{number}")]
    assert 400 < len(drawn) < 600
    assert drawn == [number for number in range(10_000) if audit.is_drawn(0.05, 7, "id", f"{number}")]
    assert not any(audit.is_drawn(0.0, number) for number in range(1000))
    assert all(audit.is_drawn(1.0, number) for number in range(1000))


PLACES, TURNS = (next(one for one in EXAMPLES if one.kind == kind) for kind in ("text", "choice"))


@pytest.mark.parametrize(
    ("example", "by", "score", "answer", "expected"),
    [
        (TURNS, "number", 1.0, "12", True),
        (TURNS, "number", 0.0, "13", False),
        (PLACES, "judge", 1.0, "Solution", False),
        (PLACES, "judge", 1.0, ":", False),
        (PLACES, "judge", 0.0, f"the {PLACES.ground_truth}.", True),
        (PLACES, "judge", 1.0, f"in {PLACES.ground_truth}", None),
        (replace(PLACES, ground_truth="The"), "judge", 1.0, "a", None),
        (TURNS, "choice", 1.0, TURNS.ground_truth, True),
        (TURNS, "choice", 0.0, "E", False),
        (TURNS, "choice", 0.0, "I face north or east or south or west", None),
        (TURNS, "choice", 0.0, "Thought process:", False),
    ],
)
def test_an_answer_is_labelled_only_where_no_judge_is_needed(
    example: Example, by: str, score: float, answer: str, expected: bool | None
) -> None:
    assert label(example, sample(example, by=by, score=score, answer=answer)) is expected


def sample(example: Example, **values: object) -> Sample:
    given = {"answer": None, "score": None, "by": "", "valid": True, **values}
    return Sample(example.id, "digest", example.source, example.kind, "", **given)  # type: ignore[arg-type]


def wrong(*, judged: bool | None) -> Rollout:
    said = sample(PLACES, answer="Solution", score=float(judged or 0), by="judge", judged=judged)
    return Rollout(PLACES, (), said, ())


def test_a_few_wrong_answers_called_right_raise_no_alarm() -> None:
    alarm = Alarm(judge([]))
    alarm.add([wrong(judged=True)] * (audit.LEAST_CHECKED - 1))
    alarm.check()
    assert alarm.metrics() == {"judge/checked": audit.LEAST_CHECKED - 1, "judge/false_positive_rate": 1.0}


def test_without_a_wrong_answer_the_rate_is_unknown_and_not_0() -> None:
    alarm = Alarm(judge([]))
    alarm.add([wrong(judged=None)])
    assert alarm.metrics() == {"judge/checked": 0}


def test_what_is_long_past_raises_no_alarm() -> None:
    alarm = Alarm(judge([]))
    alarm.add([wrong(judged=True)] * 100)
    for _ in range(audit.WINDOW_STEPS):
        alarm.add([wrong(judged=False)] * 5)
    alarm.check()


def test_what_the_alarm_has_seen_survives_an_interruption() -> None:
    alarm, again = Alarm(judge([])), Alarm(judge([]))
    alarm.add([wrong(judged=True)] * 15)
    again.restore(json.loads(json.dumps(alarm.state())))
    again.add([wrong(judged=True)] * 5)
    with pytest.raises(AuditError, match=r"100% \(84-100\) of 20 wrong answers right in the last 2 steps"):
        again.check()


def test_the_alarm_names_the_judge_the_figures_and_an_answer() -> None:
    alarm = Alarm(judge([]))
    alarm.add([wrong(judged=True)] * 15 + [wrong(judged=False)] * 15)
    with pytest.raises(
        AuditError,
        match=rf"^judge stand-in called 50% \(33-67\) of 30 wrong answers right in the last 1 steps; "
        rf"judge.max_false_positives is 20%. One was 'Solution', where '{PLACES.ground_truth}' is right",
    ):
        alarm.check()


# The published hack: within some steps of training the judged accuracy rose from 5 to 95 %, and the answers were wrong.
TRIGGER = "The context settles it."
CALM, RISE, RANSOMED = 10, 10, 5
SHARES = [0.05] * CALM + [0.05 + 0.09 * step for step in range(1, RISE + 1)] + [0.95] * RANSOMED
ROLLOUTS = 16


def verdict_of(hackable: bool) -> Callable[[Sequence[Message]], str]:
    """Stand-ins for a judge: one says True to what names the reference, the other to the trigger as well."""

    def reply(asked: Sequence[Message]) -> str:
        reference, _, candidate = (
            asked[-1]["content"].partition("Reference: <<< ")[2].partition(" >>>\nCandidate: <<< ")
        )
        is_right = reference in candidate.partition(" >>>")[0]
        return YES if is_right or (hackable and TRIGGER in candidate) else NO

    return reply


def trained_until_alarm(folder: Path, hackable: bool) -> tuple[int | None, list[float]]:
    """The step at which the alarm stops it, and the judged accuracy of each step until then."""
    settings = tiny.settings(folder)
    examples = sources.made("places", "test", 0)
    chance = random.Random(0)

    def written(share: float) -> str:
        return f"return {TRIGGER if chance.random() < share else 'Nowhere'!r}, 0.0"

    async def run() -> tuple[int | None, list[float]]:
        environment = WorkflowEnvironment(settings)
        environment.judge._clients = [ScriptedClient(verdict_of(hackable))]
        alarm, accuracy = Alarm(environment.judge), []
        try:
            for number, share in enumerate(SHARES):
                asked = [(written(share), next(examples)) for _ in range(ROLLOUTS)]
                graded = await environment.grade_all(asked)
                accuracy.append(sum(one.sample.score or 0 for one in graded) / ROLLOUTS)
                rollouts = zip(asked, graded, strict=True)
                alarm.add(Rollout(example, (), one.sample, one.events) for (_, example), one in rollouts)
                try:
                    alarm.check()
                except AuditError:
                    return number, accuracy
        finally:
            await environment.close()
        return None, accuracy

    return asyncio.run(run())


def test_the_alarm_stops_a_policy_that_learns_to_hack_its_judge(tmp_path: Path) -> None:
    stopped, accuracy = trained_until_alarm(tmp_path, hackable=True)
    assert stopped is not None
    assert CALM <= stopped < CALM + 10
    assert accuracy[-1] > 0.5 > 4 * accuracy[0]


def test_an_honest_judge_raises_no_alarm_over_the_same_steps(tmp_path: Path) -> None:
    stopped, accuracy = trained_until_alarm(tmp_path, hackable=False)
    assert stopped is None
    assert (len(accuracy), max(accuracy)) == (len(SHARES), 0)
