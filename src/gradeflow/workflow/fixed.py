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


def program(operator: str, asked: tuple[str, str] = ("Custom", "AnswerGenerate"), answer: str = "solution") -> str:
    """The body of a workflow around one operator; an ensemble chooses between the answers of two others."""
    call, key = CALLS[operator] if operator in CALLS else (_ensemble(asked), "response")
    return f'{answer} = {call}\nreturn {answer}["{key}"], {COST}'


def _ensemble(asked: tuple[str, str]) -> str:
    first, second = (f'({call})["{key}"]' for call, key in (CALLS[name] for name in asked))
    return f"await self.sc_ensemble(solutions=[{first}, {second}], problem=problem)"
