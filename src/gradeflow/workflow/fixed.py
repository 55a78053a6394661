"""The smallest workflow that uses one operator, whatever is asked: what a trained policy has to beat."""

from collections.abc import Mapping

COST = 'self.llm.get_usage_summary()["total_cost"]'

# The call of each operator that answers by itself, and the key of its answer.
CALLS: Mapping[str, tuple[str, str]] = {
    "Custom": ('await self.custom(input=problem, instruction="Answer the question.")', "response"),
    "AnswerGenerate": ("await self.answer_generate(input=problem)", "answer"),
    "CustomCodeGenerate": (
        'await self.custom_code_generate(problem=problem, entry_point=entry_point, instruction="Write the function.")',
        "response",
    ),
    "Programmer": ('await self.programmer(problem=problem, analysis="None")', "output"),
}
OPERATORS = (*CALLS, "ScEnsemble")


def program(operator: str, asked: tuple[str, str] = ("Custom", "AnswerGenerate")) -> str:
    """The body of a workflow around one operator; an ensemble chooses between the answers of two others."""
    if operator != "ScEnsemble":
        call, key = CALLS[operator]
        return f'solution = {call}\nreturn solution["{key}"], {COST}'
    (first, one), (second, two) = (CALLS[name] for name in asked)
    return (
        f"first = {first}\n"
        f"second = {second}\n"
        f'solution = await self.sc_ensemble(solutions=[first["{one}"], second["{two}"]], problem=problem)\n'
        f'return solution["response"], {COST}'
    )
