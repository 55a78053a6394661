"""Small sandboxes for tests: one run, or several in one event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from gradeflow import params
from gradeflow.errors import SetupError
from gradeflow.sandbox import Execution, Sandbox, landlock

SETTINGS = params.Sandbox(
    isolation="auto",
    wall_s=10.0,
    cpu_s=10,
    memory_mb=256,
    processes=16,
    disk_mb=4,
    output_kb=16,
    parallel=2,
)


def in_sandbox(use: Callable[[Sandbox], Awaitable[Any]], isolation: str = "auto", **settings: Any) -> Any:
    async def within() -> Any:
        sandbox = Sandbox(SETTINGS.model_copy(update={"isolation": isolation, **settings}))
        try:
            return await use(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(within())


def execute(code: str, *, isolation: str = "auto", settings: Mapping[str, Any] | None = None, **run: Any) -> Execution:
    return in_sandbox(lambda sandbox: sandbox.run(code, **run), isolation, **(settings or {}))


def lacking(layer: Any) -> str:
    """Why this machine cannot use a layer; empty where it can."""
    try:
        layer.find()
    except SetupError as error:
        return str(error)
    return ""


without_landlock = pytest.mark.skipif(bool(lacking(landlock)), reason=lacking(landlock))
both = pytest.mark.parametrize("isolation", ["auto", pytest.param("landlock", marks=without_landlock), "none"])
