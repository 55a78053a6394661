"""Workflows that run as they are: written for these tests, in both forms."""

COST = 'self.llm.get_usage_summary()["total_cost"]'

BODIES = (
    f"""\
result = await self.programmer(problem=problem, analysis="None")
if not result["output"]:
    result = await self.answer_generate(input=problem)
    return result["answer"], {COST}
return result["output"], {COST}
""",
    f"""\
solutions = []
for _ in range(3):
    solution = await self.custom(input=problem, instruction="Solve it.")
    solutions.append(solution["response"])
best = await self.sc_ensemble(solutions=solutions, problem=problem)
return best["response"], {COST}
""",
    f"""\
import re

draft = await self.custom(input=problem, instruction="Reply with a number.")
text = draft["response"].strip()
match = re.search(r"[0-9]+", text)
if match:
    answer = match.group(0)
else:
    second = await self.answer_generate(input=problem)
    answer = second["answer"]
return answer, {COST}
""",
    f"""\
try:
    result = await self.programmer(problem=problem)
    answer = result["output"]
except Exception as error:
    reason = str(error)
    thought = await self.answer_generate(input=problem + reason)
    answer = thought["answer"]
return answer, {COST}
""",
    f"""\
from collections import Counter

votes = Counter()
for number in range(4):
    reply = await self.answer_generate(input=problem)
    votes[reply["answer"]] += 1
    if votes[reply["answer"]] > 1:
        break
winner, count = votes.most_common(1)[0]
return winner if count > 1 else str(winner), {COST}
""",
    f"""\
import asyncio

async def ask(text):
    reply = await self.custom(input=text, instruction="Answer.")
    return reply["response"]

first, second = await asyncio.gather(ask(problem), ask(problem + entry_point))
if first == second:
    return first, {COST}
best = await self.sc_ensemble(solutions=[first, second], problem=problem)
return best["response"], {COST}
""",
    f"""\
attempts = 0
answer = ""
while attempts < 3 and not answer:
    result = await self.programmer(problem=problem, analysis=f"attempt {{attempts}}")
    answer = result["output"]
    attempts += 1
if not answer:
    fallback = await self.custom(input=problem, instruction="Guess.")
    answer = fallback["response"]
return answer, {COST}
""",
    """\
kind = "code" if entry_point else "text"
if kind == "code":
    reply = await self.custom_code_generate(problem=problem, entry_point=entry_point, instruction="Write it.")
elif len(problem) > 40:
    reply = await self.custom(input=problem, instruction="Be brief.")
else:
    reply = await self.custom(input=problem, instruction="Explain.")
usage = self.llm.get_usage_summary()
return reply["response"], usage["total_cost"]
""",
    f"""\
plan = await self.custom(input=problem, instruction="Plan the steps.")
steps = [step for step in plan["response"].split(".") if step]
notes = []
for number, step in enumerate(steps):
    note = await self.custom(input=step, instruction=f"Do step {{number}}.")
    notes.append(note["response"])
summary = "\\n".join(notes)
final = await self.answer_generate(input=problem + summary)
return final["answer"], {COST}
""",
    f"""\
verdict = await self.custom(input=problem, instruction="Is it hard?")
match verdict["response"]:
    case "yes" | "true":
        result = await self.programmer(problem=problem)
        answer = result["output"]
    case other:
        reply = await self.answer_generate(input=other)
        answer = reply["answer"]
return answer, {COST}
""",
    f"""\
def tidy(text):
    lines = text.splitlines()
    last = lines[-1] if lines else text
    return last.strip()

thought = await self.answer_generate(input=problem)
answer = tidy(thought["answer"])
is_short = len(answer) < 20
if is_short:
    check = await self.custom(input=answer, instruction="Check it.")
    note = check["response"]
if is_short and note:
    return tidy(note), {COST}
return answer, {COST}
""",
    f"""\
import json

found = False
for style in ("json", "plain"):
    reply = await self.custom(input=problem, instruction=style)
    try:
        value = json.loads(reply["response"])
    except ValueError:
        continue
    found = True
    break
if found:
    return str(value), {COST}
spoken = await self.answer_generate(input=problem)
return spoken["answer"], {COST}
""",
)

_CLASS = """\
from typing import Literal
import workspace.{dataset}.workflows.template.operator as operator
import workspace.{dataset}.workflows.round_{round}.prompt as prompt_custom
from scripts.async_llm import create_llm_instance

from scripts.evaluator import DatasetType


class Workflow:
    def __init__(self, name: str, llm_config, dataset: DatasetType) -> None:
        self.name = name
        self.dataset = dataset
        self.llm = create_llm_instance(llm_config)
{operators}
    async def __call__(self, {parameters}):
{body}"""


def _class(dataset: str, operators: str, body: str, parameters: str = "problem: str") -> str:
    made = "".join(f"        self.{name.lower()} = operator.{name}(self.llm)\n" for name in operators.split())
    inside = "".join(f"        {line}\n" if line else "\n" for line in body.strip().split("\n"))
    return _CLASS.format(dataset=dataset, round=len(body) % 9 + 1, operators=made, parameters=parameters, body=inside)


CLASSES = (
    _class(
        "GSM8K",
        "Custom",
        f'solution = await self.custom(input=problem, instruction="")\nreturn solution["response"], {COST}',
    ),
    _class(
        "MATH",
        "Programmer AnswerGenerate ScEnsemble",
        f"""
candidates = []
computed = await self.programmer(problem=problem, analysis="None")
if computed["output"]:
    candidates.append(computed["output"])
for _ in range(2):
    thought = await self.answergenerate(input=problem)
    candidates.append(thought["answer"])
chosen = await self.scensemble(solutions=candidates, problem=problem)
return chosen["response"], {COST}
""",
    ),
    _class(
        "HumanEval",
        "CustomCodeGenerate Custom",
        f"""
solution = await self.customcodegenerate(problem=problem, entry_point=entry_point, instruction="Write it.")
code = solution["response"]
if entry_point not in code:
    critique = await self.custom(input=code, instruction="What is wrong?")
    again = await self.customcodegenerate(problem=problem, entry_point=entry_point, instruction=critique["response"])
    code = again["response"]
return code, {COST}
""",
        "problem: str, entry_point: str",
    ),
    _class(
        "HotpotQA",
        "AnswerGenerate Custom",
        f"""
async def short(text):
    reply = await self.custom(input=text, instruction="Shorten.")
    return reply["response"]

answers = {{}}
for name in ["plain", "careful"]:
    thought = await self.answergenerate(input=name + problem)
    answers[name] = await short(thought["answer"])
longest = max(answers.values(), key=len)
return longest, {COST}
""",
    ),
)

PROGRAMS = (*BODIES, *CLASSES)
