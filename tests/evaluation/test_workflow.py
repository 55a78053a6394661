from dataclasses import replace

from gradeflow.evaluation import workflow
from gradeflow.types import Example, Sample


def test_the_questions_that_one_alone_has_right_are_told_of_workflows_too() -> None:
    examples = [
        Example(f"sums-{number}", "sums", "math", f"What is {number} + 1?", f"{number + 1}") for number in range(4)
    ]

    def scored(*scores: float | None) -> list[Sample]:
        return [
            Sample(one.id, "", one.source, one.kind, "", one.ground_truth, score, "", True, ("Custom",))
            for one, score in zip(examples, scores, strict=True)
        ]

    ours, theirs = scored(1.0, 0.4, 1.0, 0.0), scored(1.0, 0.6, None, 1.0)
    theirs[0] = replace(theirs[0], answer=None, operators=(), score=0.0, failure="syntax")
    rows = list(workflow.differences(ours, theirs, examples))
    assert [(row["doc_id"], row["right"]) for row in rows] == [
        ("sums-0", "base"), ("sums-1", "adapter"), ("sums-3", "adapter"),
    ]  # fmt: skip
    assert rows[0]["question"] == "What is 0 + 1?"
    assert (rows[0]["target"], rows[0]["base"], rows[0]["adapter"]) == ("1", "1 (Custom)", "syntax")
