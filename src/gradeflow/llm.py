"""Chat with a model: at an OpenAI-compatible URL, in this process, or from a script.

A client answers or raises ProviderError; what it returns is never a stand-in for an answer that did not come.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from gradeflow import digest, params
from gradeflow.decode import Choose, decode, end_ids, greedy, sampler
from gradeflow.errors import DataError, ProviderError, SettingsError, SetupError
from gradeflow.prompt import Message
from gradeflow.redact import redact

LOCAL = "local"
NO_KEY = "EMPTY"
RETRY_TEMPERATURE = 0.3
LONGEST_WAIT_S = 30.0
GATHER_S = 0.002
KEPT_REPLIES = 4096

_REMEDIES = {
    "unreachable": "check the url, and that the server runs",
    "timeout": "raise timeout_s or lower concurrency",
    "rate_limit": "lower concurrency or raise retries",
    "server_error": "look into the server's log",
    "empty_reply": "raise max_tokens: a model may spend them all on reasoning",
    "truncated_reply": "raise max_tokens",
    "bad_request": "check model and max_tokens against what the server offers",
    "auth": "check the key and api_key_env",
}
_NOT_RETRIED = {"bad_request", "auth"}
_UNUSABLE = {"empty_reply", "truncated_reply"}


@dataclass(frozen=True, slots=True)
class Reply:
    """`cost` in USD and `seconds` include the tries that brought nothing usable."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    model: str
    seconds: float
    cost: float


class ChatClient(Protocol):
    model: str

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> Reply:
        """The reply to `messages`; None takes the endpoint's setting.

        Raises:
            ProviderError: whose cause is a key of `_REMEDIES`.
        """

    async def close(self) -> None: ...


def connect(endpoint: params.Endpoint, base_folder: Path | None) -> ChatClient:
    if endpoint.url != LOCAL:
        return OpenAIClient(endpoint)
    if base_folder is None:
        raise SettingsError("url is `local`, but there is no base model in a folder of this machine; name a URL")
    return LocalClient(base_folder, endpoint)


@dataclass(frozen=True, slots=True)
class _Request:
    messages: tuple[Message, ...]
    temperature: float
    max_tokens: int
    seed: int | None

    @property
    def key(self) -> str:
        return digest.of_json(asdict(self))


def _request(
    endpoint: params.Endpoint,
    messages: Sequence[Message],
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
) -> _Request:
    return _Request(
        tuple(messages),
        endpoint.temperature if temperature is None else temperature,
        endpoint.max_tokens if max_tokens is None else max_tokens,
        seed,
    )


class _Once:
    """Equal questions in flight share one answer; later ones too, as far back as `keep` answers reach."""

    def __init__(self, keep: int = 0) -> None:
        self._keep = keep
        self._kept: dict[str, Reply] = {}
        self._flying: dict[str, asyncio.Task[Reply]] = {}

    async def answer(self, request: _Request, ask: Callable[[_Request], Awaitable[Reply]]) -> Reply:
        key = request.key
        if key in self._kept:
            return self._kept[key]
        if key not in self._flying:
            self._flying[key] = asyncio.ensure_future(ask(request))
            self._flying[key].add_done_callback(partial(self._land, key))
        return await asyncio.shield(self._flying[key])

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


class _TryError(Exception):
    """One try that brought no usable reply, and what it cost."""

    def __init__(self, cause: str, detail: str, *, wait_s: float = 0.0, cost: float = 0.0) -> None:
        super().__init__(detail)
        self.cause = cause
        self.wait_s = wait_s
        self.cost = cost


class OpenAIClient:
    """A model at an OpenAI-compatible URL.

    A try is repeated with jittered backoff. After a reply that was empty, refused or cut off, the next try
    has twice the tokens, another seed and some temperature: the same request would bring the same reply.
    """

    def __init__(self, endpoint: params.Endpoint, *, backoff_s: float = 0.5) -> None:
        import openai

        self.model = endpoint.model
        self._endpoint = endpoint
        self._key = _key(endpoint)
        self._backoff_s = backoff_s
        self._client = openai.AsyncOpenAI(
            api_key=self._key,
            base_url=endpoint.url,
            max_retries=0,
            timeout=endpoint.timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not endpoint.no_proxy),
        )
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        self._once = _Once()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> Reply:
        request = _request(self._endpoint, messages, temperature, max_tokens, seed)
        if request.temperature > 0:
            return await self._persist(request)
        return await self._once.answer(request, self._persist)

    async def close(self) -> None:
        await self._once.close()
        await self._client.close()

    async def _persist(self, request: _Request) -> Reply:
        started, cost = time.perf_counter(), 0.0
        unusable: _TryError | None = None
        for attempt in count(1):
            try:
                reply = await self._ask(request)
                break
            except _TryError as trouble:
                cost += trouble.cost
                if trouble.cause in _NOT_RETRIED or attempt > self._endpoint.retries:
                    raise self._give_up(unusable or trouble, attempt) from None
                if trouble.cause in _UNUSABLE:
                    unusable = trouble
                    request = _varied(request, attempt)
                await asyncio.sleep(max(trouble.wait_s, self._backoff(attempt)))
        return replace(reply, seconds=time.perf_counter() - started, cost=reply.cost + cost)

    def _backoff(self, attempt: int) -> float:
        longest = min(self._backoff_s * 2**attempt, LONGEST_WAIT_S)
        return random.uniform(longest / 2, longest)

    async def _ask(self, request: _Request) -> Reply:
        import openai

        arguments: dict[str, Any] = {
            "model": self.model,
            "messages": list(request.messages),
            "temperature": request.temperature,
            "top_p": self._endpoint.top_p,
            "max_tokens": request.max_tokens,
        }
        if request.seed is not None:
            arguments["seed"] = request.seed
        try:
            async with self._slots, asyncio.timeout(self._endpoint.timeout_s):
                completion = await self._client.chat.completions.create(**arguments)
        except (openai.APITimeoutError, TimeoutError):
            raise _TryError("timeout", f"no reply within {self._endpoint.timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise _TryError("unreachable", str(error.__cause__ or error)) from None
        except openai.APIStatusError as error:
            raise _refused(error) from None
        except (openai.APIError, ValueError) as error:
            raise _TryError("server_error", f"the reply cannot be read: {error}") from None
        return self._read(completion)

    def _read(self, completion: Any) -> Reply:
        choices = getattr(completion, "choices", None)
        if choices is None:
            raise _TryError("server_error", f"expected a chat completion, got {str(completion)[:80]!r}")
        usage = getattr(completion, "usage", None)
        prompt_tokens = getattr(usage, "prompt_tokens", 0) or 0
        completion_tokens = getattr(usage, "completion_tokens", 0) or 0
        cost = prompt_tokens * self._endpoint.input_cost + completion_tokens * self._endpoint.output_cost
        cost /= 1e6
        text = choices[0].message.content if choices and choices[0].message else None
        finish_reason = (choices[0].finish_reason if choices else None) or "stop"
        if not isinstance(text, str) or not text.strip() or finish_reason == "content_filter":
            raise _TryError("empty_reply", f"no content, finish_reason {finish_reason}", cost=cost)
        if finish_reason == "length":
            raise _TryError("truncated_reply", f"cut off after {completion_tokens} tokens", cost=cost)
        return Reply(text, prompt_tokens, completion_tokens, finish_reason, self.model, 0.0, cost)

    def _give_up(self, trouble: _TryError, tries: int) -> ProviderError:
        detail = " ".join(f"{trouble}".split())[:200]
        said = (
            f"{self.model} at {self._endpoint.url}: {trouble.cause.replace('_', ' ')} "
            f"({tries} {'try' if tries == 1 else 'tries'}): {detail}; {_REMEDIES[trouble.cause]}"
        )
        return ProviderError(redact(said, {self._key}), cause=trouble.cause)


def _key(endpoint: params.Endpoint) -> str:
    if not endpoint.api_key_env:
        return NO_KEY
    if key := os.environ.get(endpoint.api_key_env):
        return key
    raise SettingsError(
        f"api_key_env: environment variable {endpoint.api_key_env} is not set; "
        f"it should hold the key for {endpoint.url}"
    )


def _varied(request: _Request, attempt: int) -> _Request:
    return replace(
        request,
        max_tokens=request.max_tokens * 2,
        seed=(request.seed or 0) + attempt,
        temperature=max(request.temperature, RETRY_TEMPERATURE),
    )


def _refused(error: Any) -> _TryError:
    """What an HTTP status other than 2xx means; a server's text about a key is left out."""
    status = error.status_code
    if status in {401, 403}:
        return _TryError("auth", f"HTTP {status}")
    detail = f"HTTP {status}: {error.message}"
    if status == 429:
        return _TryError("rate_limit", detail, wait_s=_retry_after(error.response.headers))
    if status == 408:
        return _TryError("timeout", detail)
    if status >= 500:
        return _TryError("server_error", detail, wait_s=_retry_after(error.response.headers))
    return _TryError("bad_request", detail)


def _retry_after(headers: Any) -> float:
    try:
        return min(max(float(headers.get("retry-after", 0)), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return 0.0


@dataclass(frozen=True, slots=True)
class _Generated:
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class _Call:
    request: _Request
    batch: "asyncio.Future[tuple[asyncio.Future[list[_Generated]], int]]"


class LocalClient:
    """A Hugging Face causal LM in this process, with weights of its own.

    Calls that wait at the same time are generated as one batch, in a thread. At temperature 0 an equal
    request gets the reply it got before. A reply cut off at max_tokens counts: its finish_reason is `length`.
    """

    def __init__(self, folder: Path, endpoint: params.Endpoint) -> None:
        self.model = endpoint.model or folder.name
        self._endpoint = endpoint
        self._generator = _Generator(folder, endpoint.top_p)
        self._once = _Once(KEPT_REPLIES)
        self._thread = ThreadPoolExecutor(1, "gradeflow-local")
        self._waiting: list[_Call] = []
        self._serving: asyncio.Task[None] | None = None

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> Reply:
        request = _request(self._endpoint, messages, temperature, max_tokens, seed)
        if request.temperature == 0:
            request = replace(request, seed=None)
        elif request.seed is None:
            return await self._generate(request)
        return await self._once.answer(request, self._generate)

    async def close(self) -> None:
        await self._once.close()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for call in self._waiting:
            call.batch.cancel()
        self._thread.shutdown()

    async def _generate(self, request: _Request) -> Reply:
        started = time.perf_counter()
        call = _Call(request, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        batch, index = await call.batch
        try:
            generated = (await asyncio.shield(batch))[index]
        except (RuntimeError, MemoryError) as error:
            raise ProviderError(f"{self.model} in this process: {error}", cause="server_error") from error
        if generated.finish_reason == "refused":
            said = f"{self.model} in this process: a prompt of {generated.prompt_tokens} tokens does not fit"
            raise ProviderError(said, cause="bad_request")
        return self._reply(generated, time.perf_counter() - started)

    def _reply(self, generated: _Generated, seconds: float) -> Reply:
        spent = generated.prompt_tokens * self._endpoint.input_cost
        spent += generated.completion_tokens * self._endpoint.output_cost
        return Reply(**asdict(generated), model=self.model, seconds=seconds, cost=spent / 1e6)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            await self._gather()
            for calls in self._batches():
                requests = [call.request for call in calls]
                batch = loop.run_in_executor(self._thread, self._generator.reply, requests)
                for index, call in enumerate(calls):
                    if not call.batch.done():
                        call.batch.set_result((batch, index))
                await asyncio.wait([batch])

    async def _gather(self) -> None:
        """Wait until the event loop adds no more calls."""
        seen = -1
        while seen != len(self._waiting):
            seen = len(self._waiting)
            await asyncio.sleep(GATHER_S)

    def _batches(self) -> Iterator[list[_Call]]:
        wanted = (call for call in self._waiting if not call.batch.cancelled())
        calls = sorted(wanted, key=lambda call: sum(len(said["content"]) for said in call.request.messages))
        self._waiting = []
        for start in range(0, len(calls), self._endpoint.concurrency):
            yield calls[start : start + self._endpoint.concurrency]


class _Generator:
    """Batches of requests through a causal LM. Not for use by two threads at once."""

    def __init__(self, folder: Path, top_p: float) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if not (folder / "config.json").is_file():
            raise SetupError(f"{folder}: no model here; `gradeflow base` makes the embedded one")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not self._tokenizer.chat_template:
            raise SetupError(f"{folder}: the tokenizer has no chat template; a chat model is needed")
        on_gpu = torch.cuda.is_available()
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto" if on_gpu else torch.float32, local_files_only=True
        )
        self._model = model.to("cuda" if on_gpu else "cpu").eval()
        self._top_p = top_p
        self._random = random.Random()
        self._ends = end_ids(self._model, self._tokenizer)
        self._context: int = self._model.config.max_position_embeddings

    def reply(self, requests: Sequence[_Request]) -> list[_Generated]:
        prompts = self._tokens(requests)
        rooms = [
            min(request.max_tokens, self._context - len(prompt))
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        fitting = [index for index, room in enumerate(rooms) if room > 0]
        replies = [_Generated("", len(prompt), 0, "refused") for prompt in prompts]
        if not fitting:
            return replies
        left = [rooms[index] for index in fitting]
        choose = self._chooser([requests[index] for index in fitting], max(left))
        completions = decode(self._model, [prompts[index] for index in fitting], left, self._ends, choose)
        for index, tokens in zip(fitting, completions, strict=True):
            replies[index] = self._generated(len(prompts[index]), tokens)
        return replies

    def _tokens(self, requests: Sequence[_Request]) -> list[list[int]]:
        texts = [
            self._tokenizer.apply_chat_template(list(request.messages), tokenize=False, add_generation_prompt=True)
            for request in requests
        ]
        prompts: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return prompts

    def _generated(self, prompt_tokens: int, tokens: list[int]) -> _Generated:
        ended = tokens[-1] in self._ends
        text = self._tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
        return _Generated(text, prompt_tokens, len(tokens), "stop" if ended else "length")

    def _chooser(self, requests: Sequence[_Request], longest: int) -> Choose:
        """Each row draws by its own random numbers, so that a seeded reply does not depend on its neighbours."""
        import torch

        if not any(request.temperature for request in requests):
            return greedy
        temperatures = torch.tensor([request.temperature for request in requests])
        draws = torch.stack([self._draws(request, longest) for request in requests])
        device = self._model.device
        return sampler(temperatures.to(device), draws.to(device), self._top_p)

    def _draws(self, request: _Request, longest: int) -> Any:
        import torch

        seed = self._random.getrandbits(63) if request.seed is None else request.seed
        return torch.rand(longest, generator=torch.Generator().manual_seed(seed))


@dataclass(slots=True)
class ScriptedClient:
    """A stand-in that replies from a list, or by a function of the messages; `calls` holds what was asked."""

    replies: Sequence[str | Reply | Exception] | Callable[[Sequence[Message]], str]
    model: str = "scripted"
    calls: list[list[Message]] = field(default_factory=list)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,  # noqa: ARG002 - a script has none
        max_tokens: int | None = None,  # noqa: ARG002
        seed: int | None = None,  # noqa: ARG002
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
            raise DataError(f"the script ends after {asked - 1} replies, and was asked for one more")
        return replies[asked - 1]
