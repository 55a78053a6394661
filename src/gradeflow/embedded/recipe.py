"""The recipe of the embedded base: its settings, and all that says what it is taught and how.

It names what the lessons are made of and no more: an operator, a prompt or a dataset that they do not use leaves the
base as it is.
"""

from pathlib import Path
from typing import Any

from gradeflow import digest, judge, params, prompt
from gradeflow.embedded import curriculum
from gradeflow.workflow import fixed, operators

PACKAGE = Path(__file__).parent.parent
FORMATS = ("gsm8k", "commonsenseqa", "hotpotqa", "humaneval")
INGREDIENTS = (
    "embedded/*.py",
    "prompt.py",
    "workflow/fixed.py",
    *(f"sources/{name}.py" for name in ("__init__", *curriculum.SOURCES, *FORMATS)),
)
PROMPTS = ("policy", "judge", *operators.prompts(fixed.OPERATORS))
# Settings that say where it lies and how it is measured, not what it is.
ASIDE = {"model", "revision", "folder", "measure"}


def recipe(settings: params.Base) -> dict[str, Any]:
    files = sorted(path for pattern in INGREDIENTS for path in PACKAGE.glob(pattern))
    return {
        "settings": settings.model_dump(mode="json", exclude=ASIDE),
        "files": {path.relative_to(PACKAGE).as_posix(): digest.of_file(path) for path in files},
        "prompts": {name: prompt.load(name).version for name in PROMPTS},
        "operators": operators.describe(fixed.OPERATORS),
        "judge": judge.SYSTEM,
    }
