"""A model at an OpenAI-compatible URL, through the official client."""

import asyncio
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradeflow import params
from gradeflow.errors import FINAL, ProviderError, SettingsError
from gradeflow.llm.cache import Cache
from gradeflow.llm.client import Once, Reply, Request, request
from gradeflow.llm.pace import Pace
from gradeflow.prompt import Message
from gradeflow.redact import redact

NO_KEY = "EMPTY"
LONGEST_WAIT_S = 30.0
PROBE_S = 10.0
LEAST_ROOM = 16
"""A reply with room for fewer tokens is not asked for."""
MESSAGE_TOKENS = 16
"""What a chat template adds to each message, at most."""

REMEDIES = {
    "unreachable": "check the url, and that the server runs",
    "timeout": "raise timeout_s or lower concurrency",
    "deadline": "raise deadline_s, or look into why the server is slow",
    "rate_limit": "raise deadline_s: the server took no more calls until then",
    "server_error": "look into the server's log",
    "empty_reply": "raise max_tokens: a model may spend them all on reasoning",
    "truncated_reply": "raise max_tokens",
    "bad_request": "check model and max_tokens against what the server offers",
    "too_long": "shorten the prompt, lower max_tokens, or serve the model with a larger context",
    "auth": "check the key: api_key_env or api_key_file",
}
_UNUSABLE = {"empty_reply", "truncated_reply"}
_TOO_LONG = re.compile(r"context[ _](?:length|window)|maximum context|max_model_len|too many tokens", re.IGNORECASE)


class TryError(Exception):
    """One try that brought no usable reply, and what it cost."""

    def __init__(self, cause: str, detail: str, *, wait_s: float = 0.0, cost: float = 0.0, busy: bool = False) -> None:
        super().__init__(detail)
        self.cause = cause
        self.wait_s = wait_s
        self.cost = cost
        self.busy = busy


class OpenAIClient:
    """Calls with jittered backoff, as many at once as the server takes, each until its deadline.

    A reply that was empty, refused or cut off is asked for again with twice the tokens, another seed and some
    temperature: the same request would bring the same reply. A server that is too busy costs a call none of its tries.
    """

    def __init__(self, settings: params.Model, *, backoff_s: float = 0.5) -> None:
        import openai

        self.model = settings.model
        self.pace = Pace(settings.concurrency)
        self._settings = settings
        self._key = _key(settings)
        self._backoff_s = backoff_s
        self._client = openai.AsyncOpenAI(
            api_key=self._key,
            base_url=settings.url,
            max_retries=0,
            timeout=settings.timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not settings.no_proxy),
        )
        self._once = Once()
        self.usage = self._once.usage
        self._cache = Cache(Path(settings.cache)) if settings.cache else None
        self._window = _Window(self._client, settings)
        self._unsupported: frozenset[str] = frozenset()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Reply:
        asked = request(self._settings, messages, temperature, max_tokens, seed, schema)
        if not asked.repeatable:
            return await self._once.answer(None, lambda: self._persist(asked))
        key = asked.key([self._settings.url, self.model, self._settings.top_p])
        return await self._once.answer(key, lambda: self._recall(key, asked))

    async def close(self) -> None:
        await self._once.close()
        await self._client.close()
        if self._cache:
            self._cache.close()

    async def _recall(self, key: str, asked: Request) -> Reply:
        if self._cache and (reply := self._cache.get(key)):
            return reply
        reply = await self._persist(asked)
        if self._cache and (self._key == NO_KEY or self._key not in reply.text):
            self._cache.put(key, reply)
        return reply

    async def _persist(self, asked: Request) -> Reply:
        started = time.perf_counter()
        troubles: list[TryError] = []
        try:
            async with asyncio.timeout(None) as deadline:
                while True:
                    try:
                        reply = await self._try(asked, deadline)
                        break
                    except TryError as trouble:
                        troubles.append(trouble)
                        tries = sum(not each.busy for each in troubles)
                        if trouble.cause in FINAL or tries > self._settings.retries:
                            raise self._give_up(troubles) from None
                        if trouble.cause in _UNUSABLE:
                            asked = asked.varied(tries)
                        refused = len(troubles) - tries
                        await asyncio.sleep(max(trouble.wait_s, self._backoff(refused - 1 if trouble.busy else tries)))
        except TimeoutError:
            late = TryError("deadline", f"no reply within {self._settings.deadline_s:g} s")
            raise self._give_up(troubles or [late]) from None
        seconds, cost = time.perf_counter() - started, reply.cost + sum(trouble.cost for trouble in troubles)
        return replace(reply, seconds=seconds, cost=cost, tries=len(troubles) + 1)

    def _backoff(self, tries: int) -> float:
        longest = min(self._backoff_s * 2 ** min(tries, 10), LONGEST_WAIT_S)
        return random.uniform(longest / 2, longest)

    async def _try(self, asked: Request, deadline: asyncio.Timeout) -> Reply:
        """The deadline runs from a call's first turn; from then on its turns come before those of others."""
        room = await self._window.room(asked)
        async with self.pace.turn(ahead=deadline.when() is not None):
            if deadline.when() is None:
                deadline.reschedule(asyncio.get_running_loop().time() + self._settings.deadline_s)
            try:
                reply = await self._ask(asked, min(asked.max_tokens, room))
            except TryError as trouble:
                if trouble.busy or trouble.cause == "timeout":
                    self.pace.overloaded()
                elif trouble.cause != "unreachable":
                    self.pace.served()
                raise
            self.pace.served()
            return reply

    async def _ask(self, asked: Request, max_tokens: int, without: frozenset[str] = frozenset()) -> Reply:
        """One request; what the server says it has no use for is left out from then on."""
        import openai

        without |= self._unsupported
        arguments: dict[str, Any] = {
            "model": self.model,
            "messages": list(asked.messages),
            "temperature": asked.temperature,
            "top_p": self._settings.top_p,
            "max_completion_tokens" if "max_tokens" in without else "max_tokens": max_tokens,
        }
        if asked.seed is not None:
            arguments["seed"] = asked.seed
        if asked.schema is not None:
            schema = {"name": "reply", "schema": dict(asked.schema), "strict": True}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        sent = {name: value for name, value in arguments.items() if name not in without}
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                completion = await self._client.chat.completions.create(**sent)
        except (openai.APITimeoutError, TimeoutError):
            raise TryError("timeout", f"no reply within {self._settings.timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise TryError("unreachable", str(error.__cause__ or error)) from None
        except openai.APIStatusError as error:
            if culprit := _unsupported(error, sent):
                reply = await self._ask(asked, max_tokens, without | {culprit})
                self._unsupported |= {culprit}
                return reply
            raise _refused(error) from None
        except (openai.APIError, ValueError) as error:
            raise TryError("server_error", f"the reply cannot be read: {error}") from None
        return self._read(completion)

    def _read(self, completion: Any) -> Reply:
        choices = getattr(completion, "choices", None)
        if choices is None:
            raise TryError("server_error", f"expected a chat completion, got {str(completion)[:80]!r}")
        usage = getattr(completion, "usage", None)
        prompt_tokens = getattr(usage, "prompt_tokens", 0) or 0
        completion_tokens = getattr(usage, "completion_tokens", 0) or 0
        cost = prompt_tokens * self._settings.input_cost + completion_tokens * self._settings.output_cost
        cost /= 1e6
        text = choices[0].message.content if choices and choices[0].message else None
        finish_reason = (choices[0].finish_reason if choices else None) or "stop"
        if not isinstance(text, str) or not text.strip() or finish_reason == "content_filter":
            raise TryError("empty_reply", f"no content, finish_reason {finish_reason}", cost=cost)
        if finish_reason == "length":
            raise TryError("truncated_reply", f"cut off after {completion_tokens} tokens", cost=cost)
        return Reply(text, prompt_tokens, completion_tokens, finish_reason, self.model, 0.0, cost)

    def _give_up(self, troubles: Sequence[TryError]) -> ProviderError:
        """A reply that could not be used says more than what came of asking for a longer one."""
        trouble = next((each for each in reversed(troubles) if each.cause in _UNUSABLE), troubles[-1])
        tries = len(troubles)
        detail = " ".join(f"{trouble}".split())[:200]
        said = (
            f"{self.model} at {self._settings.url}: {trouble.cause.replace('_', ' ')} "
            f"({tries} {'try' if tries == 1 else 'tries'}): {detail}; {REMEDIES[trouble.cause]}"
        )
        return ProviderError(redact(said, {self._key}), cause=trouble.cause)


class _Window:
    """How many tokens the model can have in all, and how many of them a prompt leaves for its reply."""

    def __init__(self, client: Any, settings: params.Model) -> None:
        self._client = client
        self._settings = settings
        self._tokens = settings.context
        self._known = bool(settings.context)
        self._counts = True  # whether the server counts a prompt's tokens, as vLLM does
        self._asking = asyncio.Lock()

    async def room(self, asked: Request) -> int:
        """Raises TryError where too little is left. What cannot be told is left to the server."""
        if not self._known:
            async with self._asking:
                if not self._known:
                    self._tokens = await self._of_server()
                    self._known = True
        if not self._tokens:
            return asked.max_tokens
        texts = [message["content"] for message in asked.messages]
        most = sum(len(text.encode()) + MESSAGE_TOKENS for text in texts)  # no token is shorter than a byte
        if most + asked.max_tokens <= self._tokens:
            return asked.max_tokens
        least = sum(len(text.split()) for text in texts)  # nor longer than a word
        if least + LEAST_ROOM > self._tokens:
            raise TryError("too_long", f"a prompt of {least} words or more; the model's context has {self._tokens}")
        counted = await self._count(asked)
        if counted is None:
            return asked.max_tokens
        if counted + LEAST_ROOM > self._tokens:
            raise TryError("too_long", f"a prompt of {counted} tokens; the model's context has {self._tokens}")
        return self._tokens - counted

    async def _of_server(self) -> int:
        """As the list of models has it (vLLM and others); 0 where it has nothing."""
        try:
            async with asyncio.timeout(PROBE_S):
                listed = await self._client.models.list()
        except Exception:  # noqa: BLE001 - the call itself will say what is wrong
            return 0
        lengths = {model.id: getattr(model, "max_model_len", None) for model in listed.data or ()}
        found = lengths.get(self._settings.model)
        return found if isinstance(found, int) else 0

    async def _count(self, asked: Request) -> int | None:
        if not self._counts:
            return None
        root = re.sub(r"/v\d+/?$", "", str(self._client.base_url))
        body = {"model": self._settings.model, "messages": list(asked.messages), "add_generation_prompt": True}
        try:
            async with asyncio.timeout(PROBE_S):
                counted = await self._client.post(f"{root}/tokenize", body=body, cast_to=object)
            return int(counted["count"])
        except Exception:  # noqa: BLE001 - other servers have no such route
            self._counts = False
            return None


def _key(settings: params.Model) -> str:
    if settings.api_key_env:
        if key := os.environ.get(settings.api_key_env):
            return key
        if not settings.api_key_file:
            raise SettingsError(
                f"api_key_env: environment variable {settings.api_key_env} is not set; "
                f"it should hold the key for {settings.url}"
            )
    if not settings.api_key_file:
        return NO_KEY
    try:
        key = Path(settings.api_key_file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "not UTF-8"
        raise SettingsError(f"api_key_file: {settings.api_key_file}: {said}; it should hold a key") from None
    if not key:
        raise SettingsError(
            f"api_key_file: {settings.api_key_file} is empty; it should hold the key for {settings.url}"
        )
    return key


def _unsupported(error: Any, sent: Mapping[str, Any]) -> str:
    """The argument that the server refuses: OpenAI names it; of others, a schema is what they may not know."""
    if error.status_code == 400 and error.code in {"unsupported_parameter", "unsupported_value"}:
        return error.param if error.param in sent and error.param not in {"model", "messages"} else ""
    return "response_format" if "response_format" in sent and error.status_code in {400, 404, 422, 501} else ""


def _refused(error: Any) -> TryError:
    """What an HTTP status other than 2xx means; a server's text about a key is left out."""
    status = error.status_code
    if status in {401, 403}:
        return TryError("auth", f"HTTP {status}")
    detail = f"HTTP {status}: {error.message}"
    if status in {429, 503}:
        cause = "rate_limit" if status == 429 else "server_error"
        return TryError(cause, detail, wait_s=_retry_after(error.response.headers), busy=status == 429)
    if status == 408:
        return TryError("timeout", detail)
    if status >= 500:
        return TryError("server_error", detail, wait_s=_retry_after(error.response.headers))
    if status in {400, 413} and _TOO_LONG.search(detail):
        return TryError("too_long", detail)
    return TryError("bad_request", detail)


def _retry_after(headers: Any) -> float:
    try:
        return min(max(float(headers.get("retry-after", 0)), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return 0.0
