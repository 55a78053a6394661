"""What a policy wrote is read, mended where that is safe, or refused with the class of what is wrong."""

from pathlib import Path

import pytest

from gradeflow import params
from gradeflow.types import Example
from gradeflow.workflow.operators import OPERATORS
from gradeflow.workflow.program import Program, ProgramError, parse, policy_messages

COST = 'self.llm.get_usage_summary()["total_cost"]'

BODY = f"""\
result = await self.programmer(problem=problem, analysis="None")
if not result["output"]:
    result = await self.answer_generate(input=problem)
    return result["answer"], {COST}
return result["output"], {COST}"""

CLASS = f"""\
from typing import Literal
import workspace.math.workflows.template.operator as operator
from scripts.async_llm import create_llm_instance
from scripts.evaluator import DatasetType


class Workflow:
    def __init__(self, name: str, llm_config, dataset: DatasetType) -> None:
        self.name = name
        self.llm = create_llm_instance(llm_config)
        self.solver = operator.Programmer(self.llm)
        self.vote = operator.ScEnsemble(self.llm)

    async def __call__(self, problem: str):
        solutions = [await self.solve(problem) for _ in range(3)]
        best = await self.vote(solutions=solutions, problem=problem)
        return best["response"], {COST}

    async def solve(self, problem):
        solution = await self.solver(problem=problem)
        return solution["output"]
"""

TRIED = "try:\n    r = await self.programmer(p)\nexcept ValueError:\n    pass\nreturn r['output'], 0"
BOX = "class Box:\n    def __init__(self):\n        self.x = 1\n    def get(self):\n        return self.x"
PROMPTS = "import workspace.math.workflows.round_1.prompt as prompts"

GATHERED = """\
import asyncio
waiting = [self.answer_generate(input=problem) for _ in range(2)]
first, second = await asyncio.gather(*waiting)
return first["answer"], 0"""

HELPED = """\
async def ask(text):
    return await self.answer_generate(text)
result = await ask(problem)
return result["answer"], 0"""


def indented(text: str) -> str:
    return "    " + text.replace("\n", "\n    ")


def refusal(completion: str, **options: object) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        parse(completion, **options)
    return caught.value


def test_a_body_is_a_program() -> None:
    assert parse(BODY) == Program(BODY, "body")


def test_a_whole_workflow_class_is_a_program() -> None:
    assert parse(CLASS) == Program(CLASS, "class")


@pytest.mark.parametrize("around", ["```python\n{}\n```", "```\n{}", "Here it is:\n\n```py\n{}\n```\nDone."])
@pytest.mark.parametrize("source", [BODY, CLASS.strip("\n")])
def test_a_fence_is_taken_off(around: str, source: str) -> None:
    assert parse(around.format(source)).source == source


def test_a_fence_inside_a_text_stays() -> None:
    source = f'''r = await self.custom(input=problem, instruction="""Reply with
```python
code
```""")
return r["response"], {COST}'''
    assert parse(source) == Program(source, "body")


def test_a_body_that_is_indented_as_a_whole_is_read() -> None:
    assert "await self.programmer" in parse(indented(BODY)).source


def test_an_indented_else_keeps_its_if() -> None:
    source = parse(f" if problem:\n    x = 'a'\nelse:\n    x = 'b'\nreturn x, {COST}").source
    assert source.startswith("if problem:")


@pytest.mark.parametrize(
    ("completion", "failure", "said"),
    [
        ("return (", "syntax", "line 1"),
        ("def f():\n    await f()\nreturn '', 0", "syntax", "await"),
        ("x = '\0'\nreturn x, 0", "syntax", "null"),
        ("", "contract", "no `return"),
        ("# only a remark", "contract", "no `return"),
        ("x = await self.custom(input=problem, instruction='')", "contract", "no `return"),
        ("def answer():\n    return 1, 2\nanswer()", "contract", "no `return"),
        ("return 'a', 'b', 0", "contract", "3 values"),
        ("class Workflow:\n    pass", "contract", "__call__"),
        ("class Workflow:\n    def __call__(self, problem):\n        return 1, 0", "contract", "__call__"),
        (
            "class Workflow:\n    async def __call__(self, problem, entry_point, test, more):\n        return 1, 0",
            "contract",
            "asks for more",
        ),
        ("r = await self.magic(input=problem)\nreturn r['response'], 0", "operator", "self.magic"),
        (CLASS.replace("operator.ScEnsemble", "operator.Vote"), "operator", "operator.Vote"),
        (CLASS.replace("self.solve(problem)", "self.resolve(problem)"), "operator", "self.resolve"),
        ("def ask():\n    return self.custom('', '')['response']\nreturn ask(), 0", "await", "Custom"),
        ("x = f\"{self.custom('', '')['response']}\"\nreturn x, 0", "await", "Custom"),
        ("r = await self.custom(prompt=problem)\nreturn r['response'], 0", "arguments", "not prompt"),
        ("r = await self.custom(input=problem)\nreturn r['response'], 0", "arguments", "lacks instruction"),
        ("r = await self.answer_generate(problem, problem)\nreturn r['answer'], 0", "arguments", "takes 1"),
        ("r = await self.answer_generate(problem, input='')\nreturn r['answer'], 0", "arguments", "twice"),
        (CLASS.replace("solutions=solutions", "answers=solutions"), "arguments", "not answers"),
        ("import os\nreturn os.getcwd(), 0", "import", "os"),
        ("from subprocess import run\nreturn 'x', 0", "import", "subprocess"),
        ("from . import secrets\nreturn 'x', 0", "import", "secrets"),
        (CLASS.replace("scripts.evaluator", "scripts.secrets"), "import", "scripts.secrets"),
        ("from math import sqroot\nreturn 1, 0", "import", "math.sqroot"),
        ("return __import__('os').getcwd(), 0", "import", "__import__"),
        ("return input(), 0", "stdin", "input"),
        ("import sys\nreturn sys.stdin.read(), 0", "stdin", "sys.stdin"),
        ("return eval(problem), 0", "name", "eval"),
        ("return open(problem).read(), 0", "name", "open"),
        ("return str(problem.__class__.__subclasses__()), 0", "attribute", "__subclasses__"),
        ("return str(getattr(self, '__class__')), 0", "attribute", "__class__"),
        ("return self.nothing, 0", "attribute", "self.nothing"),
        ("return problem.stripp(), 0", "attribute", "problem.stripp"),
        ("import math\nreturn math.sqroot(4), 0", "attribute", "math.sqroot"),
        ("return 'x', self.llm.get_cost()", "attribute", "get_cost"),
        ("r = await self.programmer(problem=problem)\nreturn r.output, 0", "attribute", "r.output"),
        (f"{PROMPTS}\n{CLASS}".replace("problem=problem", "problem=prompts.X"), "attribute", "prompts.X"),
        ("return", "contract", "no `return"),
        ("if problem:\n    return 'a', 0\nreturn", "contract", "nothing"),
        ("if problem:\n    return 'a', 0\nx = 1", "contract", "ends without"),
        ("r = await self.programmer(problem=problem)\nreturn r", "contract", "no pair"),
        ("return undefined, 0", "unbound", "never assigned"),
        ("total += 1\nreturn total, 0", "unbound", "before it is assigned"),
        ("def ask():\n    return unknown\nreturn ask(), 0", "unbound", "unknown"),
        (CLASS.replace("dataset: DatasetType", "dataset: Data"), "unbound", "Data"),
    ],
)
def test_what_is_wrong_is_refused_with_its_class(completion: str, failure: str, said: str) -> None:
    error = refusal(completion)
    assert error.failure == failure
    assert said in error.reason


@pytest.mark.parametrize(
    "completion",
    [
        GATHERED,
        "waiting = self.answer_generate(input=problem)\nresult = await waiting\nreturn result['answer'], 0",
        HELPED,
        "given = {'input': problem}\nr = await self.answer_generate(**given)\nreturn r['answer'], 0",
        "from collections import Counter\nimport math, re, json\nreturn Counter('aab').most_common(1)[0]",
        "pair = ('a', 0)\nreturn pair",
    ],
)
def test_right_programs_stay_as_they_are(completion: str) -> None:
    assert parse(completion) == Program(completion, "body")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("return problem", f"return problem, {COST}"),
        ("return (problem)", f"return (problem, {COST})"),
        ("x = 'é' + problem; return x  # done", f"x = 'é' + problem; return x, {COST}  # done"),
        ("return f'{problem}'", f"return f'{{problem}}', {COST}"),
        (
            "r = await self.programmer(problem=problem)\nreturn r['output'].strip()",
            f"r = await self.programmer(problem=problem)\nreturn r['output'].strip(), {COST}",
        ),
        (
            "if problem:\n    return 'yes'\nreturn 'no'",
            f"if problem:\n    return 'yes', {COST}\nreturn 'no', {COST}",
        ),
    ],
)
def test_a_missing_cost_is_added(written: str, meant: str) -> None:
    assert parse(written) == Program(meant, "body", ("missing_cost",))


@pytest.mark.parametrize("name", ["Programmer", "programmer_", "PROGRAMMER"])
def test_the_case_of_an_operator_is_put_right(name: str) -> None:
    program = parse(f"r = await self.{name}(problem=problem)\nreturn r['output'], 0")
    assert program == Program(
        "r = await self.programmer(problem=problem)\nreturn r['output'], 0", "body", ("operator_case",)
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (
            "r = self.programmer(problem)\nreturn r['output'], 0",
            "r = await self.programmer(problem)\nreturn r['output'], 0",
        ),
        ("self.programmer(problem)\nreturn 'x', 0", "await self.programmer(problem)\nreturn 'x', 0"),
        ("return self.programmer(problem)['output'], 0", "return (await self.programmer(problem))['output'], 0"),
        (
            "best = await self.sc_ensemble([self.programmer(problem)], problem)\nreturn best['response'], 0",
            "best = await self.sc_ensemble([await self.programmer(problem)], problem)\nreturn best['response'], 0",
        ),
        (HELPED.replace("= await ask", "= ask"), HELPED),
        (CLASS.replace("await self.vote", "self.vote"), CLASS),
        (CLASS.replace("await self.solve", "self.solve"), CLASS),
    ],
)
def test_a_missing_await_is_added(written: str, meant: str) -> None:
    program = parse(written)
    assert (program.source, program.mends) == (meant, ("missing_await",))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (
            "import re\nif problem:\n    x = problem\nreturn x, 0",
            'x = ""; import re\nif problem:\n    x = problem\nreturn x, 0',
        ),
        (
            "if problem:\n    n = len(problem)\nreturn str(n), 0",
            "n = 0\nif problem:\n    n = len(problem)\nreturn str(n), 0",
        ),
        (
            f"p = problem\n{TRIED}",
            f'r = {{"code": "", "output": ""}}; p = problem\n{TRIED}',
        ),
        (
            "'Doc.'\nfor word in problem.split():\n    last = [word]\nreturn last[0], 0",
            "'Doc.'\nlast = []\nfor word in problem.split():\n    last = [word]\nreturn last[0], 0",
        ),
    ],
)
def test_a_variable_that_may_be_unbound_is_initialised(written: str, meant: str) -> None:
    assert parse(written) == Program(meant, "body", ("missing_initial_value",))


@pytest.mark.parametrize(
    ("written", "added"),
    [
        ("x = re.sub('a', '', problem)\nreturn x, 0", "import re; "),
        ("c = Counter(problem)\nreturn len(c), 0", "from collections import Counter; "),
        (CLASS.partition("\n")[2].replace("name: str", "name: List[str]"), "from typing import List; "),
    ],
)
def test_a_missing_import_is_added(written: str, added: str) -> None:
    program = parse(written)
    assert (program.source, program.mends) == (added + written, ("missing_import",))


@pytest.mark.parametrize("name", OPERATORS)
def test_aflows_graphs_may_use_every_operator(name: str) -> None:
    operator = OPERATORS[name]
    given = ", ".join(f"{parameter}=problem" for parameter in operator.required)
    source = f"""\
from typing import Literal
import workspace.MBPP.workflows.template.operator as operator
import workspace.MBPP.workflows.round_3.prompt as prompt_custom
from scripts.async_llm import create_llm_instance

from scripts.evaluator import DatasetType

class Workflow:
    def __init__(self, name: str, llm_config, dataset: DatasetType) -> None:
        self.llm = create_llm_instance(llm_config)
        self.ask = operator.{name}(self.llm)

    async def __call__(self, problem: str, entry_point: str):
        answer = await self.ask({given})
        return answer["{operator.returns[0]}"], {COST}"""
    assert parse(source) == Program(source, "class")


@pytest.mark.parametrize(
    "source",
    [
        "input = problem\nreturn input, 0",
        "def open(text):\n    return text\nreturn open(problem), 0",
        "try:\n    x = 1 / 0\nexcept Exception as error:\n    x = error.__class__.__name__\nreturn x, 0",
        f"{BOX}\nreturn Box().get(), 0",
        "x = getattr(self, 'extra', '') if hasattr(self, 'extra') else self.llm\nreturn str(x), 0",
    ],
)
def test_a_name_of_the_programs_own_is_allowed(source: str) -> None:
    assert parse(source) == Program(source, "body")


def test_a_missing_return_is_added() -> None:
    assert parse("x = problem\nx, 0") == Program("x = problem\nreturn x, 0", "body", ("missing_return",))


def test_the_case_is_put_right_in_a_class_too() -> None:
    program = parse(
        CLASS.replace("operator.ScEnsemble", "operator.sc_ensemble").replace("await self.vote", "await self.Vote")
    )
    assert program.mends == ("operator_case",)
    assert program.source == CLASS.replace("await self.vote", "await self.vote")


def test_several_mends_are_all_recorded() -> None:
    program = parse("r = await self.AnswerGenerate(input=problem)\nreturn r['answer']")
    assert program.mends == ("operator_case", "missing_cost")


def test_a_name_of_the_programs_own_is_no_misspelt_operator() -> None:
    source = CLASS.replace("self.solver", "self.Custom")
    assert parse(source) == Program(source, "class")


def test_an_operator_that_is_not_offered_is_refused() -> None:
    completion = "r = await self.programmer(problem=problem)\nreturn r['output'], 0"
    assert refusal(completion, offered=("Custom",)).failure == "operator"
    assert refusal(CLASS, offered=("Custom", "ScEnsemble")).failure == "operator"


def test_hopeless_nesting_is_a_syntax_error_of_the_program() -> None:
    assert refusal("x = " + "(" * 5000 + ")" * 5000).failure == "syntax"
    assert refusal("x = " + "-" * 100_000 + "1\nreturn x, 0").failure == "syntax"


def test_warnings_of_the_parser_are_not_ours() -> None:
    source = "x = '\\d'\nreturn x, 0"
    assert parse(source).source == source


def test_the_policy_reads_the_problem_and_the_operators_and_no_answer() -> None:
    settings = params.load(Path(__file__).parents[2] / "params.yaml").workflow
    example = Example(
        "1", "functions", "code", "Write {add}.", "42", {"test": "assert add(1) == 2", "entry_point": "add"}
    )
    (message,) = policy_messages(example, settings)
    assert "Write {add}." in message["content"]
    assert all(f"self.{OPERATORS[name].attribute}(" in message["content"] for name in settings.operators)
    assert "assert add" not in message["content"]
    assert "42" not in message["content"]
