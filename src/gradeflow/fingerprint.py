"""What a stage's result depends on, as one digest: its settings, its inputs, and Gradeflow's own code.

A finished run with the same fingerprint can stand in for a new one; an interrupted one can be gone on with.
"""

import functools
from collections.abc import Iterable
from pathlib import Path

from gradeflow import digest
from gradeflow.params import Params

PACKAGE = Path(__file__).parent


def of(params: Params, sections: Iterable[str], *inputs: str) -> str:
    """Fingerprint of the named sections and of `inputs`, the digests of what the stage reads."""
    settings = params.model_dump(mode="json", include=set(sections))
    return digest.of_json({"settings": settings, "inputs": inputs, "code": code()})


@functools.cache
def code() -> str:
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".txt"})
    return digest.of_json({path.relative_to(PACKAGE).as_posix(): digest.of_file(path) for path in files})
