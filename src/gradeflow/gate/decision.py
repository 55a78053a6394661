"""Whether a challenger takes the champion's place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gradeflow import params
from gradeflow.errors import PromotionError
from gradeflow.gate import inference
from gradeflow.gate.inference import Interval
from gradeflow.gate.looks import Look
from gradeflow.gate.paired import Comparison

Role = Literal["target", "guard"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What the test says of one task.

    `n` counts questions, `abstained` the pairs of answers left out because one has no score. `p_gain` is corrected for
    all tests that could have shown a gain; `p_loss` is that of a loss of the margin or more. `detectable` is the gain
    that so many questions show with the policy's power.
    """

    task: str
    role: Role
    n: int
    abstained: int
    mean_challenger: float
    mean_champion: float
    difference: float
    interval: Interval
    wins: int
    losses: int
    p_gain: float
    p_loss: float
    margin: float
    detectable: float


@dataclass(frozen=True, slots=True)
class Decision:
    """`findings` are the targets', then the guards'. `level` is what p-values of gains were held against."""

    promote: bool
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    level: float
    among: int

    @property
    def first(self) -> Finding:
        return self.findings[0]


def decide(
    comparisons: Sequence[Comparison], policy: params.Promote, *, among: int = 1, look: Look | None = None
) -> Decision:
    """Decide by a policy; the challenger is the best `among` so many.

    Raises:
        PromotionError: a task that the policy names was not evaluated.
    """
    look = look or Look()
    level = look.level(policy.alpha)
    by_task = {one.task: one for one in comparisons}
    if missing := [task for task in [*policy.targets, *policy.guards] if task not in by_task]:
        raise PromotionError(
            f"not evaluated: {', '.join(missing)}, which promote.targets and promote.guards name; there are "
            f"{', '.join(by_task) or 'no tasks'}. Evaluate with these among evaluate.tasks"
        )
    gains = inference.holm([inference.p_gain(by_task[task].differences) for task in policy.targets], among)
    tests = len(policy.targets) * among
    findings = (
        *(
            _finding(by_task[task], "target", gain, policy.margin, level / tests, policy)
            for task, gain in zip(policy.targets, gains, strict=True)
        ),
        *(_finding(by_task[task], "guard", 1.0, margin, level, policy) for task, margin in policy.guards.items()),
    )
    winners = [one for one in findings if _gains(one, level, policy)]
    against = tuple(_objections(findings, winners, level, policy, by_task))
    alone = len(findings) == 1
    reasons = against or tuple(f"{_named(one, alone=alone)}{_reached(one, level)}" for one in winners)
    return Decision(not against, reasons, findings, level, among)


def decided(comparison: Comparison, policy: params.Promote, look: Look) -> Literal["for", "against"] | None:
    """Whether more questions are needed to decide on one target; None where they are.

    Against means: what counts as a gain is ruled out, wrongly at most as often as the policy's power allows.
    """
    differences = comparison.differences
    if not look.is_last and comparison.abstained > policy.max_fault_share * comparison.pairs:
        return None
    enough = len(differences) >= policy.minimum_n and differences.mean() >= policy.minimum_effect
    if enough and inference.p_gain(differences) <= look.level(policy.alpha):
        return "for"
    short = inference.p_short(differences, policy.minimum_effect)
    if look.is_last or short <= look.level(1 - policy.power):
        return "against"
    return None


def _finding(
    comparison: Comparison, role: Role, gain: float, margin: float, level: float, policy: params.Promote
) -> Finding:
    differences = comparison.differences
    mean = _mean(differences)
    return Finding(
        task=comparison.task,
        role=role,
        n=len(comparison),
        abstained=comparison.abstained,
        mean_challenger=_mean(comparison.challenger),
        mean_champion=_mean(comparison.champion),
        difference=mean,
        interval=inference.bootstrap(differences),
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        p_gain=gain,
        p_loss=inference.p_loss(differences, margin),
        margin=margin,
        detectable=inference.detectable(differences, level, policy.power),
    )


def _mean(values: inference.Differences) -> float:
    return float(values.mean()) if len(values) else 0.0


def _gains(found: Finding, level: float, policy: params.Promote) -> bool:
    return found.role == "target" and found.difference >= policy.minimum_effect and found.p_gain <= level


def _objections(
    findings: Sequence[Finding],
    winners: Sequence[Finding],
    level: float,
    policy: params.Promote,
    comparisons: dict[str, Comparison],
) -> Iterator[str]:
    alone = len(findings) == 1
    for one in findings:
        name, share = _named(one, alone=alone), one.abstained / max(comparisons[one.task].pairs, 1)
        if share > policy.max_fault_share:
            yield f"{name}{share:.1%} of the pairs have no score; at most {policy.max_fault_share:.1%} may lack one"
        if one.n < policy.minimum_n:
            yield f"{name}{one.n} questions are too few to decide on; at least {policy.minimum_n} are needed"
    if not winners:
        for one in findings:
            if one.role == "target":
                yield from _no_gain(one, _named(one, alone=alone), level, policy)
    for one in findings:
        if one not in winners and (winners or one.role == "guard") and one.p_loss > policy.alpha:
            yield (
                f"{_named(one, alone=alone)}a loss of {one.margin:.1%} or more is not ruled out: {one.difference:+.1%} "
                f"over {one.n} questions, p = {one.p_loss:.2g}"
            )


def _no_gain(one: Finding, name: str, level: float, policy: params.Promote) -> Iterator[str]:
    if one.difference < policy.minimum_effect:
        yield f"{name}a difference of {one.difference:+.1%} is below the least that counts, {policy.minimum_effect:.1%}"
    if one.p_gain > level:
        yield f"{name}the difference may be chance: p = {one.p_gain:.2g}, at most {level:.2g} is asked for"


def _named(one: Finding, *, alone: bool) -> str:
    return "" if alone else f"{one.task}: "


def _reached(one: Finding, level: float) -> str:
    return f"a difference of {one.difference:+.1%} over {one.n} questions, p = {one.p_gain:.2g} (at most {level:.2g})"
