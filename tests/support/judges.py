"""Settings of a judge, whatever params.yaml holds."""

from gradeflow import params

JUDGE = params.Judge(
    models=["judge"],
    votes=1,
    temperature=0.0,
    structured=True,
    prompts={},
    longest_answer=400,
    audit_share=0.0,
    max_false_positives=0.2,
)
