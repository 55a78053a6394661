"""How many answers a second the scorer grades, beside what one would call instead, in the same run.

    python perf/scorer.py

Every second answer is wrong; `right` is the share of answers that are graded as they should be. What stands beside runs
unit tests without isolation, and expressions in this process, where one answer can keep it busy or change it.
"""

import argparse
import asyncio
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gradeflow import params, sources
from gradeflow.sandbox import Sandbox
from gradeflow.scorer import Scorer
from gradeflow.types import Example, Score

PARAMS = Path(__file__).parents[1] / "params.yaml"
STEPS = "First there are 3 of them, then 4 more, and each costs $12.50, which makes 7 * 12.5 = 87.5 in all. " * 5
EXPRESSIONS = (
    (r"\frac{1}{2}", "0.5", r"\frac{1}{3}"),
    (r"2\sqrt{3}", r"\sqrt{12}", r"\sqrt{6}"),
    ("x^2+2x+1", "(x+1)^2", "x^2+1"),
    (r"\frac{\pi}{4}", r"\arctan(1)", r"\frac{\pi}{3}"),
)
Answers = Sequence[tuple[Example, str]]
Grade = Callable[[Example, str], float]


def answers(kind: str, count: int) -> Answers:
    """Right and wrong ones in turn."""
    if kind == "expression":
        asked = [(Example("e", "math", "math", "?", given[0]), given) for given in EXPRESSIONS]
        pairs = [(example, rf"So it is $\boxed{{{given[right]}}}$") for example, given in asked for right in (1, 2)]
        return list(itertools.islice(itertools.cycle(pairs), count))
    made = sources.made(
        {"number": "word_problems", "choice": "turns", "tests": "functions"}.get(kind, "places"), "test", 0
    )
    return [
        (example, answer(kind, example, wrong=bool(n % 2))) for n, example in enumerate(itertools.islice(made, count))
    ]


def answer(kind: str, example: Example, *, wrong: bool) -> str:
    truth = example.ground_truth
    match kind:
        case "number":
            return f"{STEPS}\n#### {int(truth) + wrong}"
        case "choice":
            labels = example.extra["choices"]["label"]
            return f"{STEPS}The answer is ({labels[(labels.index(truth) + wrong) % len(labels)]})."
        case "tests":
            return f"{example.problem}{'    return None' if wrong else truth}\n"
        case _:
            return "nowhere" if wrong else f"in {truth}, I think"


def lm_eval_number() -> Grade:
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    strict, ignored = RegexFilter(), [",", r"\$", r"(?s).*#### ", r"\.$"]

    def grade(example: Example, answer: str) -> float:
        ((found,),) = strict.apply([[answer]], [{}])
        asked = {"predictions": [found], "references": [example.ground_truth], "regexes_to_ignore": ignored}
        return float(exact_match_hf_evaluate(**asked)["exact_match"])

    return grade


def lm_eval_choice() -> Grade:
    from lm_eval.filters.extraction import RegexFilter

    letter = RegexFilter(r"answer is \(?([A-Z])")
    return lambda example, answer: float(letter.apply([[answer]], [{}])[0][0] == example.ground_truth)


def trl_expression() -> Grade:
    from trl.rewards import accuracy_reward

    def grade(example: Example, answer: str) -> float:
        (found,) = accuracy_reward([[{"content": answer}]], [f"${example.ground_truth}$"])
        return found or 0.0

    return grade


def subprocess_tests() -> Grade:
    def grade(example: Example, answer: str) -> float:
        code = f"{answer}\n{example.extra['test']}\ncheck({example.extra['entry_point']})"
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0)

    return grade


def squad_f1() -> Grade:
    from transformers.data.metrics.squad_metrics import compute_f1

    return lambda example, answer: float(compute_f1(example.ground_truth, answer))


KINDS: tuple[tuple[str, str, int, Callable[[], Grade]], ...] = (
    ("number", "lm-eval's GSM8K, strict", 2000, lm_eval_number),
    ("choice", "lm-eval's regex filter", 2000, lm_eval_choice),
    ("token F1", "transformers' SQuAD", 2000, squad_f1),
    ("tests", "subprocess", 80, subprocess_tests),
    ("expression", "TRL's accuracy_reward", 400, trl_expression),
)


async def ours(scorer: Scorer, given: Answers) -> list[float]:
    outcomes = await asyncio.gather(*(scorer.score(example, answer) for example, answer in given))
    return [outcome.value if isinstance(outcome, Score) else -1.0 for outcome in outcomes]


def right(values: Sequence[float]) -> float:
    return sum((value > 0) == (not n % 2) for n, value in enumerate(values)) / len(values)


async def measure(settings: params.Params, scale: float) -> None:
    sandbox = Sandbox(settings.sandbox)
    scorer = Scorer(settings.scorer.model_copy(update={"judge": "never"}), sandbox, None)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {settings.sandbox.parallel} runs at once\n")
    print(f"{'scores a second':12} {'scorer':>9}{'right':>7}   {'beside':26}{'':>9}{'right':>7}{'ratio':>9}")
    pool = ThreadPoolExecutor(settings.sandbox.parallel)
    try:
        for kind, name, count, beside in KINDS:
            given = answers(kind, max(8, int(count * scale)))
            grade = beside()
            await ours(scorer, given[:4])
            grade(*given[0])
            began = time.perf_counter()
            found = await ours(scorer, given)
            rate, began = len(given) / (time.perf_counter() - began), time.perf_counter()
            # TRL's function has no time limit outside the main thread
            at_once = pool.map if kind == "tests" else map
            theirs = list(at_once(lambda pair: grade(*pair), given))  # noqa: B023 - done before the next
            other = len(given) / (time.perf_counter() - began)
            print(f"{kind:15} {rate:9.0f}{right(found):7.0%}   {name:26}", end="")
            print(f"{other:9.0f}{right(theirs):7.0%}{rate / other:9.2f}")
    finally:
        await sandbox.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of answers")
    scale = parser.parse_args().scale
    logging.disable(logging.WARNING)
    asyncio.run(measure(params.load(PARAMS), scale))


if __name__ == "__main__":
    main()
