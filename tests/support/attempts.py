"""A competition worked on by a script, in a sandbox of its own."""

import asyncio
from collections.abc import Sequence

from gradeflow.attempt import Attempt, solve_task
from gradeflow.benchmarks import Competition
from gradeflow.llm import ScriptedClient
from gradeflow.params import Params
from gradeflow.sandbox import Sandbox


def attempted(
    settings: Params, competition: Competition, replies: Sequence[str | Exception], **more: object
) -> Attempt:
    async def run() -> Attempt:
        sandbox = Sandbox(settings.sandbox)
        try:
            return await solve_task(competition, ScriptedClient(replies), sandbox, settings.solve, **more)
        finally:
            await sandbox.close()

    return asyncio.run(run())
