"""The recipe of the embedded base: its settings, and the files that say what it is taught and how."""

from pathlib import Path
from typing import Any

from gradeflow import digest, params

PACKAGE = Path(__file__).parent.parent
INGREDIENTS = ("embedded/*.py", "sources/*.py", "prompt.py", "prompts/*.txt", "workflow/operators.py")
# Settings that say where it lies and how it is measured, not what it is.
ASIDE = {"model", "revision", "folder", "measure"}


def recipe(settings: params.Base) -> dict[str, Any]:
    files = sorted(path for pattern in INGREDIENTS for path in PACKAGE.glob(pattern))
    return {
        "settings": settings.model_dump(mode="json", exclude=ASIDE),
        "files": {path.relative_to(PACKAGE).as_posix(): digest.of_file(path) for path in files},
    }
