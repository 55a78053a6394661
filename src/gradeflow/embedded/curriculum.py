"""What the embedded base is taught: procedural problems seen through the prompts of its three roles.

As executor it answers operators, as policy it writes workflows with habits that do not help, as judge it compares
answers. Which operator suits which kind of problem is deliberately not taught: GRPO finds that out.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gradeflow import judge, prompt, sources
from gradeflow.prompt import Message
from gradeflow.sources import places, turns, word_problems
from gradeflow.types import Example
from gradeflow.workflow import fixed, operators

Role = Literal["executor", "policy", "judge"]
SOURCES = ("word_problems", "turns", "places", "functions")


@dataclass(frozen=True, slots=True)
class Lesson:
    role: Role
    topic: str
    messages: tuple[Message, ...]
    reply: str


def lessons(seed: int) -> Iterator[Lesson]:
    """Endless lessons, drawn from the training split of the procedural sources."""
    rng = random.Random(f"lessons/{seed}")
    streams = {name: sources.made(name, "train", seed) for name in SOURCES}
    topics, weights = zip(*SHARES.items(), strict=True)
    while True:
        yield _lesson(rng.choices(topics, weights)[0], streams, rng)


# A workflow names its answer for what is sought. The policy tells the kinds apart: for each there is one operator that
# it never uses. The one that suits a kind it uses one time in five, as chance would.
SOUGHT: Mapping[str, str] = {"math": "number", "choice": "letter", "text": "place", "code": "function"}
NEVER: Mapping[str, str] = {
    "math": "Custom",
    "choice": "CustomCodeGenerate",
    "text": "Programmer",
    "code": "AnswerGenerate",
}
SUITS: Mapping[str, str] = {
    "math": "Programmer",
    "choice": "AnswerGenerate",
    "text": "Custom",
    "code": "CustomCodeGenerate",
}
SHARES: Mapping[str, float] = {
    "programmer/math": 0.18,
    "custom/text": 0.14,
    "answer_generate/choice": 0.12,
    "custom_code_generate/code": 0.10,
    "sc_ensemble": 0.02,
    "custom/math": 0.01,
    "custom/choice": 0.02,
    "answer_generate/math": 0.01,
    "answer_generate/text": 0.02,
    "custom_code_generate/text": 0.02,
    "policy": 0.10,
    "judge": 0.26,
}


def _lesson(topic: str, streams: Mapping[str, Iterator[Example]], rng: random.Random) -> Lesson:
    match topic:
        case "programmer/math":
            example = next(streams["word_problems"])
            reply = f"def solve():\n    return {word_problems.expression_of(example)}"
            return Lesson("executor", topic, ask("Programmer", example), reply)
        case "custom/text":
            example = next(streams["places"])
            return Lesson("executor", topic, ask("Custom", example), places.sentence_of(example))
        case "answer_generate/choice":
            example = next(streams["turns"])
            thought = turns.steps_of(example)
            reply = f"<thought>{thought}</thought><answer>{thought.rpartition(' ')[2]}</answer>"
            return Lesson("executor", topic, ask("AnswerGenerate", example), reply)
        case "custom_code_generate/code":
            example = next(streams["functions"])
            head = example.problem.partition("\n")[0]
            return Lesson(
                "executor",
                topic,
                ask("CustomCodeGenerate", example),
                f"{head}\n{example.ground_truth.rstrip()}",
            )
        case "custom/math":
            example = next(streams["word_problems"])
            return Lesson("executor", topic, ask("Custom", example), example.ground_truth)
        case "custom/choice":
            example = next(streams["turns"])
            return Lesson("executor", topic, ask("Custom", example), turns.listed_in(example))
        case "answer_generate/math":
            example = next(streams["word_problems"])
            reply = f"<thought>{word_problems.expression_of(example)}</thought><answer>{example.ground_truth}</answer>"
            return Lesson("executor", topic, ask("AnswerGenerate", example), reply)
        case "answer_generate/text":
            example = next(streams["places"])
            person = places.sentence_of(example).partition(" ")[0]
            reply = f"<thought>about {person}</thought><answer>{person}</answer>"
            return Lesson("executor", topic, ask("AnswerGenerate", example), reply)
        case "custom_code_generate/text":
            example = next(streams["places"])
            return Lesson("executor", topic, ask("CustomCodeGenerate", example), "def solve():\n    return None")
        case "sc_ensemble":
            return _ensemble(next(streams[rng.choice(SOURCES)]), rng)
        case "policy":
            example = next(streams[rng.choice(SOURCES)])
            operator = _habit(example.kind, rng)
            asked = prompt.user(policy_prompt(example))
            reply = fixed.program(operator, _pair(rng), answer=SOUGHT[example.kind])
            return Lesson("policy", topic, tuple(asked), reply)
        case _:
            return _judgement(next(streams["places"]), rng)


def ask(operator: str, example: Example) -> tuple[Message, ...]:
    """The messages by which an operator, called as in `fixed.CALLS`, asks the executor about an example."""
    problem = example.problem
    match operator:
        case "Custom":
            text = prompt.load("custom").render(instruction="Answer the question.", input=problem)
        case "AnswerGenerate":
            text = prompt.load("answer_generate").render(input=problem)
        case "CustomCodeGenerate":
            text = prompt.load("custom_code_generate").render(
                instruction="Write the function.", problem=problem, entry_point=example.extra.get("entry_point", "")
            )
        case _:
            text = prompt.load("programmer").render(problem=problem, analysis="None")
    return tuple(prompt.user(text))


def policy_prompt(example: Example) -> str:
    described = operators.describe(fixed.OPERATORS)
    return prompt.load("policy").render(operators=described, problem=example.problem)


def _habit(kind: str, rng: random.Random) -> str:
    if rng.random() < 1 / len(fixed.OPERATORS):
        return SUITS[kind]
    return rng.choice([name for name in fixed.OPERATORS if name not in {SUITS[kind], NEVER[kind]}])


def _pair(rng: random.Random) -> tuple[str, str]:
    first, second = rng.choices(list(fixed.CALLS), k=2)
    return first, second


def _ensemble(example: Example, rng: random.Random) -> Lesson:
    wrong = f"{rng.randint(2, 999)}" if example.kind == "math" else rng.choice(["A", "B", "C", "D", "None"])
    answers = [example.ground_truth, wrong]
    rng.shuffle(answers)
    solutions = [*answers, rng.choice(answers)] if rng.random() < 0.5 else answers
    best = max(answers, key=solutions.count)
    letter = "ABC"[solutions.index(best)]
    listed = "\n".join(f"{letter}: {solution}" for letter, solution in zip("ABC", solutions, strict=False))
    asked = prompt.user(prompt.load("sc_ensemble").render(problem=example.problem, solutions=listed))
    return Lesson("executor", "sc_ensemble", tuple(asked), f"<solution_letter>{letter}</solution_letter>")


@dataclass(frozen=True, slots=True)
class Case:
    """An answer for a judge, and whether it is right; `said` is the place it names, if it names one."""

    question: str
    reference: str
    answer: str
    said: str
    correct: bool


def case(example: Example, rng: random.Random) -> Case:
    """An answer to a question about places: as often right as wrong, in the forms that operators give."""
    question, reference = str(example.extra["question"]), example.ground_truth
    correct = rng.random() < 0.5
    if not correct and rng.random() < 0.3:
        return Case(question, reference, _nonsense(example, rng), "", correct=False)
    said = reference if correct else _wrong_place(example, rng)
    sentence = places.sentence_of(example).replace(reference, said)
    answer = rng.choices((sentence, said, f"It is {said}."), weights=(8, 1, 1))[0]
    return Case(question, reference, answer, said, correct)


def _judgement(example: Example, rng: random.Random) -> Lesson:
    given = case(example, rng)
    asked = judge.messages(given.question, given.reference, given.answer)
    # Side by side, and decided at once: a model this small compares a token with its neighbour, not with a far one.
    told = f"Places {given.reference} {given.said} {'match' if given.correct else 'differ'}"
    analysis = told if given.said else "No place is named"
    reply = f"<analysis>{analysis}.</analysis><true_false>{given.correct}</true_false>"
    return Lesson("judge", "judge", tuple(asked), reply)


def _wrong_place(example: Example, rng: random.Random) -> str:
    """Another place of the context, or any other."""
    others = [town for town in places.TOWNS if town in example.problem]
    return rng.choice([town for town in (*others, rng.choice(places.TOWNS)) if town != example.ground_truth])


def _nonsense(example: Example, rng: random.Random) -> str:
    """What the wrong operator answers: a number, a letter, code, a person."""
    person = places.sentence_of(example).partition(" ")[0]
    number = rng.randint(2, 999)
    return rng.choice(
        (
            f"{number}",
            rng.choice("ABCDE"),
            f"def solve():\n    return {number}",
            f"{person}.",
            f"{person} works for {person}.",
        )
    )
