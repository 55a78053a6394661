"""A vLLM server that is asked by token ids, and told which adapters to load.

Log-probabilities are those of the distribution that tokens were drawn from, which takes a server that was started with
`--logprobs-mode processed_logprobs`; by default vLLM tells those at temperature 1, whatever the temperature was.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow.errors import ProviderError, SetupError

BUSY = frozenset({408, 429, 502, 503, 504})
LONGEST_WAIT_S = 5.0
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said with every question: a server's defaults may be those of the model's own generation_config.json."""


@dataclass(frozen=True, slots=True)
class Card:
    """A model that the server offers. `root` is where it was loaded from; an adapter has a parent."""

    name: str
    root: str
    parent: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Written:
    """What was sampled: token ids, the one that ends it included, and the log-probability of each."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class NotServedError(ProviderError):
    """The server has no model of that name: it was never loaded, or the server was started again."""


class VllmClient:
    """`url` ends in /v1. A server that is busy or away is asked again until it has been so for `patience_s`.

    `gone` says why there is no use in that, if there is none: a server of one's own that has ended does not come back.
    """

    def __init__(
        self, url: str, key: str, concurrency: int, patience_s: float, gone: Callable[[], str] = lambda: ""
    ) -> None:
        import httpx

        self.url = url
        self._patience_s = patience_s
        self._gone = gone
        self._turns = asyncio.Semaphore(concurrency)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(patience_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
            trust_env=False,
        )

    async def cards(self) -> list[Card]:
        listed = await self._ask("GET", "models")
        return [
            Card(one["id"], one.get("root") or "", one.get("parent") or "", one.get("max_model_len") or 0)
            for one in listed["data"]
        ]

    async def can_load(self) -> bool:
        """Whether the server lets adapters be loaded while it runs."""
        try:
            await self._ask("POST", "load_lora_adapter", {"lora_name": "", "lora_path": ""})
        except NotServedError:
            return False
        except ProviderError as error:
            if error.cause != "bad_request":
                raise
        return True

    async def load(self, name: str, folder: Path) -> None:
        """Raises SetupError where the server cannot; a name that carries a digest and is there already is the same."""
        try:
            await self._ask("POST", "load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except ProviderError as error:
            if "already been loaded" in str(error):
                return
            if error.cause not in {"bad_request", "not_served", "server_error"}:
                raise
            raise SetupError(
                f"{error}. The server must have been started with --enable-lora and a --max-lora-rank that is large "
                f"enough, and see {folder} under that name: train.rollouts.folder names one that both see"
            ) from None

    async def unload(self, name: str) -> None:
        with suppress(NotServedError):
            await self._ask("POST", "unload_lora_adapter", {"lora_name": name})

    async def write(
        self, model: str, prompt: Sequence[int], *, seed: int, temperature: float, max_tokens: int, ends: Sequence[int]
    ) -> Written:
        """Sample one completion.

        Raises:
            NotServedError: there is no such model.
            ProviderError: the server was busy or away for too long, or answers with something else.
        """
        question = {
            **PLAIN,
            "model": model,
            "prompt": list(prompt),
            "seed": seed,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "stop_token_ids": list(ends),
            "logprobs": 0,
            "return_token_ids": True,
        }
        async with self._turns:
            choice = (await self._ask("POST", "completions", question))["choices"][0]
        ids, log_probs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or not log_probs or len(ids) != len(log_probs):
            said = (
                f"{self.url}: the reply has no token ids with their log-probabilities; a server of vLLM 0.22 or later"
            )
            raise ProviderError(f"{said} gives them", cause="bad_request")
        return Written(tuple(ids), tuple(log_probs))

    async def read(self, model: str, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Log-probabilities, at temperature 1, of all tokens of prompts but each one's first."""
        question = {**PLAIN, "model": model, "prompt": [list(one) for one in prompts], "temperature": 1.0}
        reply = await self._ask("POST", "completions", {**question, "max_tokens": 1, "prompt_logprobs": 0})
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        return [
            place[str(token)]["logprob"]
            for prompt, choice in zip(prompts, choices, strict=True)
            for token, place in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        ]

    async def best(self, model: str, prompt: Sequence[int], temperature: float) -> float:
        """The log-probability of the likeliest next token, as the server tells it at this temperature."""
        question = {**PLAIN, "model": model, "prompt": list(prompt), "temperature": temperature}
        reply = await self._ask("POST", "completions", {**question, "max_tokens": 1, "logprobs": 1})
        return float(max(reply["choices"][0]["logprobs"]["top_logprobs"][0].values()))

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        import httpx

        began, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                response = await self._http.request(method, f"{self.url}/{path}", json=body)
            except httpx.TransportError as error:
                cause, said = "unreachable", str(error) or type(error).__name__
            else:
                if response.is_success:
                    return response.json() if "json" in response.headers.get("content-type", "") else response.text
                said = f"HTTP {response.status_code}: {_message(response)}"
                if response.status_code not in BUSY:
                    raise self._refused(response.status_code, said)
                cause = "busy"
            waited, gone = time.monotonic() - began, self._gone()
            if gone or waited >= self._patience_s:
                what = gone or f"{said} (for {waited:.0f} s)"
                after = "The" if gone else "When the server answers again, the"
                raise ProviderError(
                    f"{self.url}: {what}. {after} same command goes on from the last checkpoint", cause=cause
                )
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(0.1 * 2 ** min(tries, 10), LONGEST_WAIT_S))

    def _refused(self, status: int, said: str) -> ProviderError:
        if status == 404:
            return NotServedError(f"{self.url}: {said}", cause="not_served")
        if status in {401, 403}:
            return ProviderError(f"{self.url}: HTTP {status}; check train.rollouts.api_key_env", cause="auth")
        return ProviderError(f"{self.url}: {said}", cause="server_error" if status >= 500 else "bad_request")


def _message(response: Any) -> str:
    try:
        content = response.json()
        said = content.get("error", content)
        text = said.get("message", said) if isinstance(said, dict) else said
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:300]
