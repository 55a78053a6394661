"""What every chat client has in common: the request, the reply, and the sum of what was asked."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from gradeflow import digest, params
from gradeflow.errors import ProviderError
from gradeflow.prompt import Message

RETRY_TEMPERATURE = 0.3
"""Asked once more at temperature 0, a model repeats itself."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`cost` in USD and `seconds` include the `tries` that brought nothing usable; a `cached` one costs nothing now."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    model: str
    seconds: float
    cost: float
    tries: int = 1
    cached: bool = False


class ChatClient(Protocol):
    model: str
    usage: "Usage"

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Reply:
        """The reply to `messages`; None takes the model's setting. `schema` asks for JSON where the server has that.

        Raises:
            ProviderError: whose cause is a key of `openai.REMEDIES`.
        """

    async def close(self) -> None: ...


@dataclass(slots=True)
class Usage:
    """What a client has done so far. Calls answered from the cache, or together with an equal one, are counted as hits.

    `cost` in USD is what was spent, `seconds` the sum of what each call took.
    """

    calls: int = 0
    hits: int = 0
    tries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, reply: Reply, *, shared: bool) -> None:
        self.calls += 1
        if shared or reply.cached:
            self.hits += 1
            return
        self.tries += reply.tries
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        self.cost += reply.cost
        self.seconds += reply.seconds

    def figures(self) -> dict[str, float]:
        """As metrics: one for each number, and one for each cause of a fault."""
        numbers = {name: float(value) for name, value in asdict(self).items() if name != "faults"}
        return numbers | {f"faults/{cause}": float(count) for cause, count in self.faults.items()}


@dataclass(frozen=True, slots=True)
class Request:
    messages: tuple[Message, ...]
    temperature: float
    max_tokens: int
    seed: int | None = None
    schema: Mapping[str, Any] | None = None

    @property
    def repeatable(self) -> bool:
        """Whether an equal request is meant to get an equal reply."""
        return self.temperature == 0 or self.seed is not None

    def key(self, asked: Any) -> str:
        """The digest of the request and of `asked`: whom, and what else decides the reply."""
        return digest.of_json([asdict(self), asked])

    def varied(self, attempt: int) -> "Request":
        """A request that may fare better than this one, whose reply was empty, refused or cut off."""
        return replace(
            self,
            max_tokens=self.max_tokens * 2,
            seed=(self.seed or 0) + attempt,
            temperature=max(self.temperature, RETRY_TEMPERATURE),
        )


def request(
    model: params.Model,
    messages: Sequence[Message],
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
    schema: Mapping[str, Any] | None = None,
) -> Request:
    return Request(
        tuple(messages),
        model.temperature if temperature is None else temperature,
        model.max_tokens if max_tokens is None else max_tokens,
        seed,
        schema,
    )


class Once:
    """Counts requests. Equal ones in flight share one reply; later ones too, as far back as `keep` replies reach."""

    def __init__(self, keep: int = 0) -> None:
        self.usage = Usage()
        self._keep = keep
        self._kept: dict[str, Reply] = {}
        self._flying: dict[str, asyncio.Task[Reply]] = {}

    async def answer(self, key: str | None, ask: Callable[[], Awaitable[Reply]]) -> Reply:
        """The reply to the request with this key; one without is like no other."""
        try:
            reply, shared = (await ask(), False) if key is None else await self._shared(key, ask)
        except ProviderError as error:
            self.usage.faults[error.cause] += 1
            raise
        self.usage.add(reply, shared=shared)
        return reply

    async def _shared(self, key: str, ask: Callable[[], Awaitable[Reply]]) -> tuple[Reply, bool]:
        """The reply, and whether somebody else had asked for it."""
        if key in self._kept:
            return self._kept[key], True
        shared = key in self._flying
        if not shared:
            self._flying[key] = asyncio.ensure_future(ask())
            self._flying[key].add_done_callback(partial(self._land, key))
        return await asyncio.shield(self._flying[key]), shared

    def _land(self, key: str, task: asyncio.Task[Reply]) -> None:
        del self._flying[key]
        if task.cancelled() or task.exception() or not self._keep:
            return
        self._kept[key] = task.result()
        if len(self._kept) > self._keep:
            del self._kept[next(iter(self._kept))]

    async def close(self) -> None:
        tasks = list(self._flying.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
