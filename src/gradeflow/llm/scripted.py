"""A stand-in for a model, for tests and for trials without one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradeflow.errors import DataError
from gradeflow.llm.client import Reply, Usage
from gradeflow.prompt import Message


@dataclass(slots=True)
class ScriptedClient:
    """A stand-in that replies from a list, or by a function of the messages; `calls` holds what was asked."""

    replies: Sequence[str | Reply | Exception] | Callable[[Sequence[Message]], str]
    model: str = "scripted"
    calls: list[list[Message]] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,  # noqa: ARG002 - a script has none
        max_tokens: int | None = None,  # noqa: ARG002
        seed: int | None = None,  # noqa: ARG002
        schema: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> Reply:
        self.calls.append(list(messages))
        reply = self.replies(messages) if callable(self.replies) else self._next(self.replies)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Reply):
            return reply
        prompt_tokens = sum(len(message["content"].split()) for message in messages)
        return Reply(reply, prompt_tokens, len(reply.split()), "stop", self.model, 0.0, 0.0)

    async def close(self) -> None: ...

    def _next(self, replies: Sequence[str | Reply | Exception]) -> str | Reply | Exception:
        asked = len(self.calls)
        if asked > len(replies):
            said = f"the script ends after {len(replies)} replies, and was asked for one more"
            raise DataError(f"{said}; reviews are asked for, too, unless solve.review is false")
        return replies[asked - 1]
