"""The promotion statistics: pure functions over the saved samples of two adapters on the same questions.

The questions are what is drawn at random, so several answers to one question count as one: their mean. A challenger
must gain on a target, by a paired test corrected for all that could have been chosen instead (Holm 1979), and must be
shown to lose no more than a margin on the others. Where an evaluation may stop early, the level of each look is such
that all looks together err no more often than alpha (Lan and DeMets 1983).
"""

from gradeflow.gate.decision import Decision, Finding, decide, decided
from gradeflow.gate.inference import Interval, bootstrap, interval
from gradeflow.gate.looks import Look, even, levels
from gradeflow.gate.paired import Comparison, Pair, by_kind, compare, compare_scores, pair

__all__ = [
    "Comparison",
    "Decision",
    "Finding",
    "Interval",
    "Look",
    "Pair",
    "bootstrap",
    "by_kind",
    "compare",
    "compare_scores",
    "decide",
    "decided",
    "even",
    "interval",
    "levels",
    "pair",
]
