"""How often the promotion gate errs, what looking early saves, how long it takes, and what an unpaired test misses.

    python perf/gate.py
    python perf/gate.py --samples docs/samples/math_after_40_steps.jsonl docs/samples/math_after_10_steps.jsonl

Answers are simulated: a challenger and a champion that are right and wrong on the same questions, but for a share of
them. The unpaired test is what lm-eval's scripts/model_comparator.py computes from two results with standard errors.
"""

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from gradeflow import gate, jsonl, params
from gradeflow.gate import Comparison, Look, inference, looks

SHIPPED = params.load(Path(__file__).parents[1] / "params.yaml").promote
DIFFER = 0.3
"""Of the questions, the share that one of two equal adapters has right and the other wrong."""
EFFECT = 0.05
"""The smallest gain that counts; n is such that a test without a smallest one shows it four times of five."""


def simulated(seed: int, n: int, gain: float, differ: float = DIFFER) -> Comparison:
    same, won, lost = (1 - differ) / 2, (differ + gain) / 2, (differ - gain) / 2
    kinds = np.random.default_rng(seed).choice(4, size=n, p=[same, same, won, lost])
    ours, theirs = np.isin(kinds, (0, 2)).astype(float), np.isin(kinds, (0, 3)).astype(float)
    return Comparison("workflow", ours, theirs, 0, n)


def skewed(seed: int, n: int) -> Comparison:
    """Scores between right and wrong that are often a little better and seldom much worse: the same on average."""
    differences = np.where(np.random.default_rng(seed).random(n) < 0.9, 0.05, -0.45)
    return Comparison("workflow", 0.5 + differences, np.full(n, 0.5), 0, n)


def drawn(seed: int, n: int, gain: float) -> Comparison:
    return skewed(seed, n) if np.isnan(gain) else simulated(seed, n, gain)


def fixed(seed: int, n: int, gain: float, policy: params.Promote) -> tuple[bool, int]:
    """Whether it promotes; a gain of NaN stands for `skewed`."""
    return gate.decide([drawn(seed, n, gain)], policy).promote, n


def sequential(seed: int, n: int, gain: float, policy: params.Promote, count: int) -> tuple[bool, int]:
    """Whether it promotes, and after how many questions."""
    whole, shares = drawn(seed, n, gain), looks.even(count)
    for at, share in enumerate(shares):
        size = round(n * share)
        part = Comparison("workflow", whole.challenger[:size], whole.champion[:size], 0, size)
        if found := gate.decided(part, policy, Look(shares, at)):
            return found == "for", size
    raise AssertionError("the last look decides")


def p_unpaired(one: Comparison) -> float:
    errors = [scores.std(ddof=1) / len(one) ** 0.5 for scores in (one.challenger, one.champion)]
    return float(ndtr(-(one.challenger.mean() - one.champion.mean()) / np.hypot(*errors)))


def both(seed: int, n: int, gain: float, differ: float) -> tuple[bool, bool]:
    """Whether the paired and the unpaired test see the gain."""
    one = simulated(seed, n, gain, differ)
    return inference.p_gain(one.differences) <= SHIPPED.alpha, p_unpaired(one) <= SHIPPED.alpha


def tell_of(files: Sequence[Path]) -> None:
    """Both tests on two files of saved samples, of which `example_id` and `score` are read."""
    ours, theirs = ({row["example_id"]: [row["score"]] for row in jsonl.read(file)} for file in files)
    one = gate.compare_scores("", ours, theirs)
    wins, losses = int((one.differences > 0).sum()), int((one.differences < 0).sum())
    print(
        f"{len(one)} questions, {one.challenger.mean():.1%} and {one.champion.mean():.1%} right: {wins} won, {losses} "
        f"lost\npaired:   p = {inference.p_gain(one.differences):.3f}\nunpaired: p = {p_unpaired(one):.3f}"
    )


def shares_of(found: Sequence[tuple[bool, int]]) -> tuple[float, float]:
    """How many were promoted, and after how many questions on average."""
    return float(np.mean([promoted for promoted, _ in found])), float(np.mean([n for _, n in found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=10_000)
    parser.add_argument("--looks", type=int, default=10)
    parser.add_argument("--samples", type=Path, nargs=2, help="two files: test these instead", metavar="FILE")
    given = parser.parse_args()
    if given.samples:
        tell_of(given.samples)
        return
    sure = SHIPPED.model_copy(update={"minimum_effect": 0.0})
    bound = sure.alpha + 3 * (sure.alpha * (1 - sure.alpha) / given.tries) ** 0.5
    with multiprocessing.get_context("spawn").Pool() as pool:
        print(f"A/A, {given.tries} promotions each: at most {bound:.2%} may pass at alpha = {sure.alpha:g}")
        for gain, kind in ((0.0, "right or wrong"), (float("nan"), "skewed scores")):
            for n in (50, 200, 1000):
                one, _ = shares_of(pool.map(partial(fixed, n=n, gain=gain, policy=sure), range(given.tries), 100))
                often = partial(sequential, n=n, gain=gain, policy=sure, count=given.looks)
                many, _ = shares_of(pool.map(often, range(given.tries), 100))
                print(f"  {kind}, n = {n:5}: fixed {one:.2%}, {given.looks} looks {many:.2%}", flush=True)
        tries = given.tries // 5
        policy = SHIPPED.model_copy(update={"minimum_effect": EFFECT})
        n = round((1.645 + 0.842) ** 2 * DIFFER / EFFECT**2)
        power, _ = shares_of(pool.map(partial(fixed, n=n, gain=2 * EFFECT, policy=policy), range(tries), 50))
        longest = n
        while True:
            often = partial(sequential, n=longest, gain=2 * EFFECT, policy=policy, count=given.looks)
            equal, _ = shares_of(pool.map(often, range(tries), 50))
            if equal >= power:
                break
            longest = round(1.02 * longest)
        print(f"\nsmallest gain that counts {EFFECT:.0%}, {n} questions: of {tries} promotions")
        for gain in (0.0, EFFECT, 2 * EFFECT):
            once, _ = shares_of(pool.map(partial(fixed, n=n, gain=gain, policy=policy), range(tries), 50))
            often = partial(sequential, n=longest, gain=gain, policy=policy, count=given.looks)
            many, mean = shares_of(pool.map(often, range(tries), 50))
            print(
                f"  true gain {gain:4.0%}: fixed {once:.1%}; {given.looks} looks of at most {longest}: {many:.1%} "
                f"after {mean:.0f} questions, {mean / n:.2f} of {n}"
            )
        seen = np.mean(pool.map(partial(both, n=400, gain=0.05, differ=0.1), range(tries), 50), axis=0)
        print(f"\na gain of 5 % over 400 questions, the two differ on 10 %: seen by the paired test {seen[0]:.1%},")
        print(f"by the unpaired one {seen[1]:.1%} of {tries}")
    differences = np.random.default_rng(0).uniform(-1, 1, 10_000)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        gate.bootstrap(differences)
        taken.append(time.perf_counter() - started)
    print(f"\n{inference.RESAMPLES} resamples of 10000 different differences: {np.median(taken):.2f} s")


if __name__ == "__main__":
    main()
