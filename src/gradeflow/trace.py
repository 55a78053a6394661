"""What happens while an answer is made and graded, written down as events for whoever wants to look at it later."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from gradeflow.llm import ChatClient, Reply
from gradeflow.prompt import Message
from gradeflow.sandbox import Execution, Sandbox
from gradeflow.types import Event


@dataclass(slots=True)
class Span:
    """What is filled in while an event lasts; its `trace` is for what happens inside it."""

    trace: "Trace"
    outputs: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


class Trace:
    """Events in the order in which they began. Only chat events carry tokens and cost: they add up."""

    def __init__(self) -> None:
        self._events: list[Event | None] = []
        self._parent: int | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(event for event in self._events if event is not None)

    def usage(self) -> dict[str, float]:
        """The summary that AFlow's `llm.get_usage_summary()` gives, for everything traced so far."""
        chats = [event for event in self.events if event.kind == "chat"]
        return {
            "total_input_tokens": sum(event.prompt_tokens for event in chats),
            "total_output_tokens": sum(event.completion_tokens for event in chats),
            "total_cost": sum(event.cost for event in chats),
            "call_count": len(chats),
        }

    @contextmanager
    def span(
        self,
        kind: Literal["workflow", "operator", "chat", "sandbox", "score"],
        name: str,
        inputs: Mapping[str, Any],
    ) -> Iterator[Span]:
        """Lasts as long as the event; an exception that ends it is its output."""
        inside = Trace()
        inside._events, inside._parent = self._events, len(self._events)
        span = Span(inside)
        self._events.append(None)
        started, clock = time.time(), time.perf_counter()
        try:
            yield span
        except Exception as error:
            span.outputs = {**span.outputs, "error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            self._events[inside._parent] = Event(
                kind,
                name,
                started,
                time.perf_counter() - clock,
                inputs,
                span.outputs,
                span.prompt_tokens,
                span.completion_tokens,
                span.cost,
                self._parent,
            )

    async def chat(self, client: ChatClient, messages: Sequence[Message], **asked: Any) -> Reply:
        with self.span("chat", client.model, {"messages": messages}) as span:
            reply = await client.chat(messages, **asked)
            span.outputs = {
                "text": reply.text,
                "finish_reason": reply.finish_reason,
                "tries": reply.tries,
                "cached": reply.cached,
            }
            span.prompt_tokens, span.completion_tokens = reply.prompt_tokens, reply.completion_tokens
            span.cost = reply.cost
        return reply

    async def run(
        self, sandbox: Sandbox, code: str, *, name: str = "run", shown: Mapping[str, Any], **given: Any
    ) -> Execution:
        """A run of the sandbox, `shown` as its inputs."""
        with self.span("sandbox", name, shown) as span:
            execution = await sandbox.run(code, **given)
            span.outputs = {"status": execution.status, "value": execution.value, "error": execution.error}
        return execution
