"""Whether two expressions are equal, by math-verify, in isolated interpreters that each compare many pairs.

In the sandbox, since 9^9^9^9 would keep it busy for ever. Importing it takes as long as twenty comparisons, so an
interpreter stays for as long as pairs come, or until its CPU time is spent.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradeflow.errors import Fault, GraderError
from gradeflow.sandbox import Sandbox

IDLE_S = 2.0
LONGEST_S = 3600.0
WORTH_A_START = 20
"""More pairs than that for each interpreter, and one more is started."""

_COMPARE = r"""
import harness
from functools import partial
import math_verify

# Their own limits are of wall time: on a busy machine what is equal would be called wrong.
parse = partial(math_verify.parse, parsing_timeout=None)
verify = partial(math_verify.verify, timeout_seconds=None)

def read(text):
    if any(mark in text for mark in ("$", r"\boxed", r"\(", r"\[")):
        return parse(text)
    return parse(f"${text}$") or parse(text)  # bare, 2\sqrt{3} would be read as 2

pair = harness.inputs
while pair:
    reference = read(pair["reference"])
    equal = bool(reference) and verify(reference, read(pair["answer"]))
    pair = harness.call("next", readable=bool(reference), equal=equal)
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`limit` is the one that the two of them broke, in words."""

    readable: bool
    equal: bool
    limit: str = ""


@dataclass(frozen=True, slots=True)
class _Pair:
    reference: str
    answer: str
    found: asyncio.Future[Comparison]

    @property
    def texts(self) -> dict[str, str]:
        return {"reference": self.reference, "answer": self.answer}

    def settle(self, comparison: Comparison) -> None:
        if not self.found.done():
            self.found.set_result(comparison)

    def fail(self, fault: Exception) -> None:
        if not self.found.done():
            self.found.set_exception(fault)


class Expressions:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._pairs: asyncio.Queue[_Pair] = asyncio.Queue()
        self._at_work: set[asyncio.Task[None]] = set()

    async def compare(self, reference: str, answer: str) -> Comparison:
        """Compare two texts with LaTeX, a number or a plain formula in each.

        Raises:
            Fault: math-verify or the sandbox broke; the answer is not to blame.
        """
        pair = _Pair(reference, answer, asyncio.get_running_loop().create_future())
        self._pairs.put_nowait(pair)
        if self._pairs.qsize() > WORTH_A_START * len(self._at_work) and len(self._at_work) < (os.cpu_count() or 1):
            task = asyncio.create_task(self._work())
            self._at_work.add(task)
            task.add_done_callback(self._at_work.discard)
        return await pair.found

    async def _work(self) -> None:
        while not self._pairs.empty():
            await self._compare_from(self._pairs.get_nowait(), alone=False)

    async def _compare_from(self, pair: _Pair, *, alone: bool) -> None:
        """Start an interpreter with `pair`, then hand it others. A pair that ends it has a second try, in its own."""
        current: _Pair | None = pair

        async def next_pair(_: str, found: Mapping[str, Any]) -> dict[str, str] | None:
            nonlocal current
            if current is not None:
                current.settle(Comparison(found.get("readable") is True, found.get("equal") is True))
            current = None if alone else await self._next()
            return current.texts if current else None

        try:
            execution = await self._sandbox.run(
                _COMPARE, inputs=pair.texts, handler=next_pair, wall_s=LONGEST_S, packages=True
            )
        except Fault as fault:
            (current or pair).fail(fault)
            return
        if current is None or current.found.done():
            return
        if current is not pair:
            await self._compare_from(current, alone=True)
        elif execution.status == "limit":
            pair.settle(Comparison(readable=True, equal=False, limit=execution.error))
        else:
            pair.fail(GraderError(f"math-verify crashed: {execution.error}", cause="math_verify"))

    async def _next(self) -> _Pair | None:
        try:
            async with asyncio.timeout(IDLE_S):
                return await self._pairs.get()
        except TimeoutError:
            return None
