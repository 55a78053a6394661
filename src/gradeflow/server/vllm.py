"""vLLM as the catalogue's engine: a resolver of LoRA that knows the registry, and middleware before its API.

`gradeflow serve` starts vLLM with both. The resolver is a plugin that any `vllm serve` with this package beside it has:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank 16
    curl .../v1/completions -d '{"model": "gradeflow-policy/3", ...}'

There an alias stays what it was at its first use, as vLLM keeps what was resolved. With the middleware it is followed:

    GRADEFLOW_SERVE=params.yaml vllm serve ... --middleware gradeflow.server.vllm.Middleware
"""

import asyncio
import json
import logging
import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow import adapter, params, registry, tracking
from gradeflow.errors import AdapterError, GradeflowError
from gradeflow.server import catalogue, running
from gradeflow.server.catalogue import Served
from gradeflow.server.gateway import App, Gateway, Receive, Send

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

PATIENCE_S = 120.0
"""What an adapter has to be loaded and to answer the probes, behind all that waits before it."""
log = logging.getLogger(__name__)


def settings() -> params.Params:
    """Of the file that is named, or of the project in the working folder."""
    return params.load(Path(os.environ.get(running.SETTINGS, "params.yaml")))


def register() -> None:
    """What vLLM calls in each of its processes."""
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    class Registry(LoRAResolver):  # type: ignore[misc]
        """Finds `name@alias`, `name/3`, and either with `:` and the adapter's digest, in MLflow's registry."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> "LoRARequest | None":
            from vllm.lora.request import LoRARequest

            try:
                served = await asyncio.to_thread(find, lora_name, base_model_name)
            except (GradeflowError, OSError) as error:
                log.warning("%s: %s", lora_name, error)
                return None
            return LoRARequest(lora_name, 1, str(served.folder)) if served else None

    if "gradeflow" not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver("gradeflow", Registry())


def find(name: str, base: str) -> Served | None:
    """The version that a name leads to, fetched and checked; None where the registry has none.

    Raises:
        AdapterError: it is of another base, or its files are not what was registered.
    """
    plain, _, digest = name.removeprefix("models:/").partition(":")
    if "@" not in plain and "/" not in plain:
        return None
    loaded = settings()
    tracking.connect(loaded.tracking, Path())
    version = registry.resolve(plain)
    if version is None or not version.digest.startswith(digest):
        return None
    served = catalogue.fetch(version, loaded.base, running.CACHE, "vllm")
    own, revision = catalogue.base_of(served.folder, loaded.base)
    if not catalogue.is_same_base((own, revision), (base, revision)):  # of which vLLM tells no revision here
        raise AdapterError(f"{version} is of base {own}; {base} is served here")
    return served


class Engine:
    """vLLM behind its own API, which is called in the same process.

    `parts` are what its application puts into the scopes of requests.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.parts: dict[str, Any] = {}
        self._probes: Sequence[Sequence[int]] = ()
        self._base = ""

    @property
    def dtype(self) -> str:
        return str(self._config.dtype).removeprefix("torch.")

    @property
    def base(self) -> tuple[str, str]:
        return str(self._config.model), self._config.revision or ""

    @property
    def _config(self) -> Any:
        return self.parts["app"].state.openai_serving_models.model_config

    @property
    def keys(self) -> tuple[str, ...]:
        """What vLLM itself asks its clients for: of its command line, or its environment."""
        told = self.parts["app"].state.args.api_key or [os.environ.get("VLLM_API_KEY")]
        return tuple(filter(None, told))

    async def load(self, served: Served) -> None:
        """Nothing: the first question is what loads it."""

    async def unload(self, served: Served) -> None:
        """Let vLLM forget the name; weights it unloads by itself, the longest unused first."""
        try:
            await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": served.key})
        except AdapterError as error:
            log.warning("%s: %s", served.key, error)

    async def log_probabilities(self, key: str) -> Sequence[float]:
        if not self._probes:
            self._probes = adapter.default_probes(await asyncio.to_thread(self._vocabulary))
            listed = json.loads(await self._call("GET", "/v1/models", None))
            self._base = next(one["id"] for one in listed["data"] if not one.get("parent"))
        asked = {
            "model": key or self._base,
            "prompt": self._probes,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        told = json.loads(await self._call("POST", "/v1/completions", asked))
        choices = sorted(told["choices"], key=lambda one: int(one["index"]))
        return [next(iter(place.values()))["logprob"] for one in choices for place in one["prompt_logprobs"][1:]]

    def _vocabulary(self) -> int:
        """As many tokens as the probes of an evaluation were spread over."""
        from transformers import AutoTokenizer

        config = self._config
        return len(
            AutoTokenizer.from_pretrained(
                config.tokenizer, revision=config.tokenizer_revision, trust_remote_code=config.trust_remote_code
            )
        )

    async def _call(self, method: str, path: str, body: Any) -> bytes:
        import httpx

        async def inner(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            await self.app({**self.parts, "state": dict(self.parts["state"]), **scope}, receive, send)

        headers = {"Authorization": f"Bearer {self.keys[0]}"} if self.keys else {}
        transport = httpx.ASGITransport(inner)
        opened = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)
        async with asyncio.timeout(PATIENCE_S), opened as client:
            reply = await client.request(method, path, json=body)
        if not reply.is_success:
            raise AdapterError(f"vLLM does not serve it: {reply.status_code} {reply.text[:300]}")
        return reply.content


class Middleware:
    """`Gateway` as vLLM's --middleware takes one: a class that is given the application alone."""

    def __init__(self, app: App) -> None:
        loaded = settings()
        tracking.connect(loaded.tracking, Path())
        self._engine = Engine(app)
        named = os.environ.get(loaded.serve.api_key_env, "") if loaded.serve.api_key_env else ""
        key = os.environ.get(running.KEY) or named
        run_id = os.environ.get(running.RUN, "")
        self._gateway: Gateway = running.gateway(app, self._engine, loaded, backend="vllm", key=key, run_id=run_id)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._engine.parts = {"app": scope["app"], "state": dict(scope.get("state", {}))}
        self._gateway.keys = self._gateway.keys or self._engine.keys
        await self._gateway(scope, receive, send)
