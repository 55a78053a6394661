"""A Hugging Face causal LM in this process."""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gradeflow import params
from gradeflow.decode import Choose, decode, end_ids, greedy, sampler
from gradeflow.errors import ProviderError, SetupError
from gradeflow.llm.client import Once, Reply, Request, request
from gradeflow.prompt import Message

GATHER_S = 0.002
KEPT_REPLIES = 4096


@dataclass(frozen=True, slots=True)
class _Generated:
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class _Call:
    request: Request
    batch: "asyncio.Future[tuple[asyncio.Future[list[_Generated]], int]]"


class LocalClient:
    """A Hugging Face causal LM in this process, with weights of its own.

    Calls that wait at the same time are generated as one batch, in a thread. At temperature 0 an equal
    request gets the reply it got before. A reply cut off at max_tokens counts: its finish_reason is `length`.
    """

    def __init__(self, folder: Path, settings: params.Model) -> None:
        self.model = settings.model or folder.name
        self._settings = settings
        self._generator = _Generator(folder, settings.top_p)
        self._once = Once(KEPT_REPLIES)
        self.usage = self._once.usage
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
        schema: Mapping[str, Any] | None = None,  # noqa: ARG002 - it writes what it was taught to
    ) -> Reply:
        asked = request(self._settings, messages, temperature, max_tokens, seed)
        if asked.temperature == 0:
            asked = replace(asked, seed=None)
        key = asked.key(None) if asked.repeatable else None
        return await self._once.answer(key, lambda: self._generate(asked))

    async def close(self) -> None:
        await self._once.close()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for call in self._waiting:
            call.batch.cancel()
        self._thread.shutdown()

    async def _generate(self, request: Request) -> Reply:
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
            raise ProviderError(said, cause="too_long")
        return self._reply(generated, time.perf_counter() - started)

    def _reply(self, generated: _Generated, seconds: float) -> Reply:
        spent = generated.prompt_tokens * self._settings.input_cost
        spent += generated.completion_tokens * self._settings.output_cost
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
        for start in range(0, len(calls), self._settings.concurrency):
            yield calls[start : start + self._settings.concurrency]


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

    def reply(self, requests: Sequence[Request]) -> list[_Generated]:
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

    def _tokens(self, requests: Sequence[Request]) -> list[list[int]]:
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

    def _chooser(self, requests: Sequence[Request], longest: int) -> Choose:
        """Each row draws by its own random numbers, so that a seeded reply does not depend on its neighbours."""
        import torch

        if not any(request.temperature for request in requests):
            return greedy
        temperatures = torch.tensor([request.temperature for request in requests])
        draws = torch.stack([self._draws(request, longest) for request in requests])
        device = self._model.device
        return sampler(temperatures.to(device), draws.to(device), self._top_p)

    def _draws(self, request: Request, longest: int) -> Any:
        import torch

        seed = self._random.getrandbits(63) if request.seed is None else request.seed
        return torch.rand(longest, generator=torch.Generator().manual_seed(seed))
