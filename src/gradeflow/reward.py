"""What an agent's work on a task is worth to the policy that did it: the original's reward, without its loopholes.

An experiment that ended without an error and left a submission earns 0.3, a valid submission 0.2, and its score, made a
figure from 0 to 1, as much again; experiments that left nothing cost 0.1, and less than nothing is 0. An invalid
submission has no score, which is neither a good nor a bad one, and a conclusion without an experiment earns nothing.
"""

from gradeflow.benchmarks.report import CompetitionReport

SUBMITTED, VALID, NOTHING = 0.3, 0.2, -0.1
MOST = SUBMITTED + VALID + 1.0


def reward(report: CompetitionReport, *, success: bool, experiments: int) -> float:
    """From 0 to `MOST`. `success` says that an experiment that ended well left the submission."""
    earned = SUBMITTED if success else NOTHING if experiments else 0.0
    if success and report.score is not None:
        earned += VALID + normalized(report.score, lower_is_better=report.is_lower_better)
    return max(0.0, earned)


def normalized(score: float, *, lower_is_better: bool) -> float:
    """A score as a figure from 0 to 1: 1 / (1 + score) where lower is better, and 1 there for what is not above 0."""
    if lower_is_better:
        return 1 / (1 + score) if score > 0 else 1.0
    return min(1.0, max(0.0, score))
