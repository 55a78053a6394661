import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gradeflow.errors import SandboxError
from gradeflow.expressions import Comparison, Expressions
from gradeflow.sandbox import Sandbox
from support.sandboxes import SETTINGS, in_sandbox

EQUAL, OTHER = Comparison(readable=True, equal=True), Comparison(readable=True, equal=False)
ENDLESS = "$9^{9^{9^{9}}}$"


def comparing(use: Callable[[Sandbox, Expressions], Awaitable[Any]], **settings: Any) -> Any:
    return in_sandbox(lambda sandbox: use(sandbox, Expressions(sandbox)), memory_mb=1024, **settings)


class CountingSandbox(Sandbox):
    runs = 0

    async def run(self, *given: Any, **more: Any) -> Any:
        self.runs += 1
        return await super().run(*given, **more)


def test_one_interpreter_compares_many() -> None:
    async def use() -> tuple[list[Comparison], int]:
        sandbox = CountingSandbox(SETTINGS.model_copy(update={"memory_mb": 1024}))
        expressions = Expressions(sandbox)
        try:
            asked = [expressions.compare(rf"\sqrt{{{n}}}", rf"$\sqrt{{{n + n % 2}}}$") for n in range(2, 14)]
            return await asyncio.gather(*asked), sandbox.runs
        finally:
            await sandbox.close()

    found, runs = asyncio.run(use())
    assert found == [EQUAL, OTHER] * 6
    assert runs == 1


def test_a_pair_without_end_is_not_comparable_and_spoils_no_other() -> None:
    async def use(_: Sandbox, expressions: Expressions) -> list[Comparison]:
        answers = ["$0.5$", "$0.5$", ENDLESS, "$0.5$", "$0.4$"]
        return await asyncio.gather(*(expressions.compare(r"\frac{1}{2}", answer) for answer in answers))

    *found, other = comparing(use, cpu_s=6)  # math-verify's own limit, 5 s, would call it wrong
    (endless,) = (one for one in found if one != EQUAL)
    assert found.count(EQUAL) == 3
    assert other == OTHER
    assert endless.limit
    assert not endless.equal


def test_nothing_is_left_waiting_when_the_sandbox_closes() -> None:
    async def use(sandbox: Sandbox, expressions: Expressions) -> list[Any]:
        await expressions.compare("x", "$x$")
        waiting = [asyncio.create_task(expressions.compare(r"\frac{1}{2}", ENDLESS)) for _ in range(3)]
        await asyncio.sleep(0.1)
        await sandbox.close()
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(one) for one in comparing(use)] == [SandboxError] * 3


def test_whoever_gives_up_leaves_the_others_their_turn() -> None:
    async def use(_: Sandbox, expressions: Expressions) -> Comparison:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await expressions.compare("x", "$x$")
        return await expressions.compare("x", "$x$")

    assert comparing(use) == EQUAL
