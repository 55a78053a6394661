import asyncio

import pytest

from gradeflow.errors import ProviderError
from gradeflow.llm import Reply, ScriptedClient
from gradeflow.prompt import user
from gradeflow.trace import Trace


def test_what_happens_inside_a_span_is_below_it_also_when_several_run_at_once() -> None:
    async def operator(trace: Trace, name: str) -> None:
        with trace.span("operator", name, {}) as span:
            await asyncio.sleep(0)
            await span.trace.chat(ScriptedClient(["yes"], model=f"model of {name}"), user("?"))

    async def work(trace: Trace) -> None:
        with trace.span("workflow", "workflow", {}) as span:
            await asyncio.gather(operator(span.trace, "a"), operator(span.trace, "b"))
        await trace.chat(ScriptedClient(["no"], model="last"), user("?"))

    trace = Trace()
    asyncio.run(work(trace))
    names = [event.name for event in trace.events]
    above = [event.parent is not None and names[event.parent] for event in trace.events]
    assert dict(zip(names, above, strict=True)) == {
        "workflow": False, "a": "workflow", "b": "workflow", "model of a": "a", "model of b": "b", "last": False,
    }  # fmt: skip


def test_a_call_is_recorded_with_its_reply_tokens_and_cost() -> None:
    trace = Trace()
    asyncio.run(trace.chat(ScriptedClient([Reply("yes", 10, 5, "stop", "m", 0.1, 0.25)]), user("?")))
    (event,) = trace.events
    assert (event.kind, event.name, event.inputs) == ("chat", "scripted", {"messages": user("?")})
    assert event.outputs == {"text": "yes", "finish_reason": "stop", "tries": 1, "cached": False}
    assert trace.usage() == {
        "total_input_tokens": 10, "total_output_tokens": 5, "total_cost": 0.25, "call_count": 1,
    }  # fmt: skip


def test_a_call_that_brings_nothing_says_why() -> None:
    trace = Trace()
    with pytest.raises(ProviderError):
        asyncio.run(trace.chat(ScriptedClient([ProviderError("down", cause="unreachable")]), user("?")))
    assert trace.events[0].outputs == {"error": "ProviderError: down"}
