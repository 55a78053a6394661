"""Who writes completions in training: vLLM, which gets the adapter alone, once for each update that rollouts ask for.

An adapter is saved into a folder and loaded under a name that carries its digest, never over another: vLLM keeps the
keys and values of prompts by that name. The base is never sent, and nothing is merged into it.
"""

import asyncio
import math
import os
import secrets
import shutil
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow import adapter, params
from gradeflow.adapter import BaseIdentity, vllm
from gradeflow.background import Background
from gradeflow.decode import computing, end_ids
from gradeflow.errors import AdapterError, ProviderError, SettingsError, SetupError
from gradeflow.grpo.policy import Completion
from gradeflow.llm import vllm_process
from gradeflow.llm.vllm import NotServedError, VllmClient

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

OWN = "vllm"
"""In `train.rollouts.url`: a server that is started for the run and stopped with it."""

LEAVE_S = 10.0
RELOADS = 3
SAME_BASE = 0.25
"""Nats (RMS over the probes) that two engines may differ by on one base: bfloat16 makes some hundredths."""
TELLING = 4.0
"""An adapter whose effect is so many times what the engines differ by on the base must show it in vLLM."""
LEAST = 1e-4
"""Nats; below, float32 may hide an effect."""


async def require_ready(settings: params.Train) -> None:
    """Find what would fail before a model is loaded.

    Raises:
        SettingsError: what vLLM cannot do, or a server that was not started for it.
        SetupError: vLLM is to be started, and is not there.
        ProviderError: the server does not answer.
    """
    if settings.top_p < 1 or settings.top_k:
        raise SettingsError(
            f"train.top_p is {settings.top_p:g} and train.top_k {settings.top_k}: vLLM tells log-probabilities among "
            "the tokens that these leave, the loss has them among all. Set train.top_p=1.0 and train.top_k=0, or "
            "train.rollouts.url=local"
        )
    if ends := sorted({name.rpartition(".")[2] for name in settings.lora.target_modules} & set(vllm.ENDS)):
        raise SettingsError(
            f"train.lora.target_modules: vLLM does not take LoRA on {', '.join(ends)} in full. Leave them out, or set "
            "train.rollouts.url=local"
        )
    if settings.lora.rank > vllm.RANKS[-1]:
        raise SettingsError(f"train.lora.rank: {settings.lora.rank}; vLLM takes at most {vllm.RANKS[-1]}")
    if settings.rollouts.url == OWN:
        if not vllm.program().is_file():
            raise SetupError(f"train.rollouts.url: {vllm.program()} is not there. Run `make vllm`, or set it to local")
        return
    client = VllmClient(settings.rollouts.url, _key(settings.rollouts), 1, patience_s=10.0)
    try:
        card = next((one for one in await client.cards() if not one.parent), None)
        room = settings.max_prompt_tokens + settings.max_completion_tokens
        if card is not None and 0 < card.max_model_len < room:
            raise SettingsError(
                f"train.max_prompt_tokens and max_completion_tokens: {room} tokens; {card.name} at "
                f"{settings.rollouts.url} has {card.max_model_len}. Start it with --max-model-len {room}"
            )
        if not await client.can_load():
            raise SettingsError(
                f"train.rollouts.url: the server at {settings.rollouts.url} loads no adapters while it runs. Start it "
                f"with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and {' '.join(_lora(settings))}"
            )
    finally:
        await client.close()


@contextmanager
def opened(
    model: "PeftModel",
    tokenizer: "PreTrainedTokenizerBase",
    identity: BaseIdentity,
    background: Background,
    settings: params.Train,
    folder: Path,
) -> "Iterator[VllmPolicy]":
    """The policy at the server that the settings name, or at one that runs as long as the context lasts."""
    rollouts = settings.rollouts
    adapters = Path(rollouts.folder) / folder.parent.name if rollouts.folder else folder / "policy"
    with _server(model, identity, settings, folder) as (url, key, gone):

        async def connected() -> VllmClient:
            return VllmClient(url, key, rollouts.concurrency, rollouts.patience_s, gone)

        client = background.run(connected())
        policy = VllmPolicy(client, model, tokenizer, background, settings, adapters.absolute())
        try:
            policy.connect()
            yield policy
        finally:
            policy.close()


@dataclass(frozen=True, slots=True)
class _Served:
    """What vLLM answers with: an adapter by its name and folder, or the base, and how the trainer reads the probes."""

    name: str
    folder: Path | None
    read: tuple[float, ...]


class VllmPolicy:
    """`serve` makes the model's adapter known to vLLM and returns; what is asked for is written meanwhile.

    Its log-probabilities are vLLM's own. They differ from the trainer's in the last bits, or, in bfloat16, by some
    hundredths, so the loss weighs by them, as it does by those of an older policy.
    """

    own_model = False

    def __init__(
        self,
        client: VllmClient,
        model: "PeftModel",
        tokenizer: "PreTrainedTokenizerBase",
        background: Background,
        settings: params.Train,
        folder: Path,
    ) -> None:
        self._client = client
        self._model = model
        self._background = background
        self._settings = settings
        self._folder = folder
        self._ends = end_ids(model, tokenizer)
        self._probes = adapter.default_probes(len(tokenizer))
        self._ready: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)  # of the background's thread
        self._loading = asyncio.Lock()
        self._served: dict[int, _Served] = {}
        self._base = _Served("", None, ())
        self._base_there: tuple[float, ...] = ()
        self._noise = 0.0

    def begin(self, episodes: int) -> None: ...

    def end(self) -> None: ...

    def serve(self, version: int) -> None:
        if version not in self._served:
            served = self._save(version)
            self._background.run(self._publish(version, served))

    async def complete(self, prompt: Sequence[int], seed: int, temperature: float, version: int) -> Completion:
        await self._ready[version].wait()
        served = self._served[version]
        for _ in range(RELOADS):
            with suppress(NotServedError):
                written = await self._client.write(
                    served.name,
                    prompt,
                    seed=seed,
                    temperature=temperature,
                    max_tokens=self._settings.max_completion_tokens,
                    ends=self._ends,
                )
                return Completion(written.ids, written.log_probs)
            await self._load_again(served)
        raise ProviderError(
            f"{self._client.url}: has {served.name} loaded, and does not find it. Is there more than one server behind "
            "this URL?",
            cause="not_served",
        )

    def connect(self) -> None:
        """Prove that the server has this base and takes adapters from the folder.

        Raises:
            SettingsError: it has another base, or tells other log-probabilities than the loss needs.
            SetupError: it cannot load an adapter of this training.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        with computing:
            self._base = _Served("", None, self._read(base=True))
        fresh = self._write("trial")
        self._background.run(self._meet(fresh))
        shutil.rmtree(fresh)

    def close(self) -> None:
        """Leave the server as it was, if it is there."""

        async def leave() -> None:
            with suppress(ProviderError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    for served in set(self._served.values()):
                        await self._drop(served)
            await self._client.close()

        self._background.run(leave())
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _meet(self, fresh: Path) -> None:
        cards = await self._client.cards()
        base = next((one for one in cards if not one.parent), None)
        if base is None:
            raise SettingsError(f"train.rollouts.url: {self._client.url} offers no model")
        for left in (one for one in cards if one.parent and Path(one.root).is_relative_to(self._folder)):
            await self._client.unload(left.name)  # of this run, before it was interrupted
        self._base = _Served(base.name, None, self._base.read)
        self._base_there = tuple(await self._client.read(base.name, self._probes))
        self._noise = _rms(self._base_there, self._base.read)
        if not self._noise < SAME_BASE:
            raise SettingsError(
                f"train.rollouts.url: {base.name} at {self._client.url} is not this base, or is quantized: the "
                f"log-probabilities of fixed tokens differ by {self._noise:.2g}; expected less than {SAME_BASE:g}"
            )
        warm, cold = [await self._client.best(base.name, self._probes[0], each) for each in (2.0, 0.5)]
        if warm == cold:
            raise SettingsError(
                f"train.rollouts.url: {self._client.url} tells log-probabilities at temperature 1 whatever tokens are "
                "sampled at. Start it with --logprobs-mode processed_logprobs"
            )
        await self._client.load(fresh.name, fresh)
        await self._client.unload(fresh.name)

    def _save(self, version: int) -> _Served:
        """The adapter as it is now, in a folder of its own; the base where it adds nothing, as at the start."""
        latest = next(reversed(self._served.values()), None)
        if not self._adds():
            return self._base
        folder = self._write(f"policy-{version}")
        if latest is not None and latest.name.rpartition("-")[2] == folder.name.rpartition("-")[2]:
            shutil.rmtree(folder)
            return latest
        with computing:
            return _Served(folder.name, folder, self._read())

    def _write(self, name: str) -> Path:
        part = self._folder / "part"
        self._model.save_pretrained(str(part), selected_adapters=["default"], save_embedding_layers=False)
        folder = self._folder / f"{name}-{adapter.digest(part)[:12]}"
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        return folder

    def _adds(self) -> bool:
        return any(bool(weight.any()) for name, weight in self._model.named_parameters() if "lora_B" in name)

    async def _publish(self, version: int, served: _Served) -> None:
        """Load it in the place of one that no rollout asks for: those on their way are at most `staleness` older."""
        for old in list(self._served)[: -(self._settings.staleness + 1)]:
            gone = self._served.pop(old)
            del self._ready[old]
            if gone not in self._served.values():
                await self._drop(gone)
        if served not in self._served.values():
            await self._load(served)
        self._served[version] = served
        self._ready[version].set()

    async def _load(self, served: _Served) -> None:
        if served.folder is not None:
            await self._client.load(served.name, served.folder)
            self._prove_alive(served, await self._client.read(served.name, self._probes))

    async def _load_again(self, served: _Served) -> None:
        """After the server was started again; once, however many miss it."""
        async with self._loading:
            if served.name not in [card.name for card in await self._client.cards()]:
                await self._load(served)

    async def _drop(self, served: _Served) -> None:
        if served.folder is not None:
            await self._client.unload(served.name)
            shutil.rmtree(served.folder)

    def _prove_alive(self, served: _Served, there: Sequence[float]) -> None:
        """The adapter changes vLLM's log-probabilities as it does the trainer's, where that can be told from noise."""
        here = [one - base for one, base in zip(served.read, self._base.read, strict=True)]
        found = [one - base for one, base in zip(there, self._base_there, strict=True)]
        effect = _rms(here)
        if effect > max(TELLING * self._noise, LEAST) and not _rms(here, found) < effect / 2:
            raise AdapterError(
                f"{served.folder}: in vLLM, as {served.name}, it changes the log-probabilities of fixed tokens by "
                f"{_rms(found):.2g} instead of {effect:.2g}, or those of others: not all modules are bound, or their "
                "scale is another"
            )

    def _read(self, *, base: bool = False) -> tuple[float, ...]:
        """Log-probabilities of the probes' tokens, by the trainer's own model."""
        import torch

        tokens = torch.tensor([list(probe) for probe in self._probes], device=self._model.device)
        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), self._model.disable_adapter() if base else torch.no_grad():
                shares = self._model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
        finally:
            self._model.train(training)
        found: list[float] = shares.gather(-1, tokens[:, 1:, None]).flatten().tolist()
        return tuple(found)


def _rms(values: Sequence[float], others: Sequence[float] | None = None) -> float:
    differences = values if others is None else [one - other for one, other in zip(values, others, strict=True)]
    return math.sqrt(math.fsum(each * each for each in differences) / len(differences))


@contextmanager
def _server(model: Any, identity: BaseIdentity, settings: params.Train, folder: Path) -> Iterator[Any]:
    """URL, key, and what says why it does not come back, if it does not."""
    if settings.rollouts.url != OWN:
        yield settings.rollouts.url, _key(settings.rollouts), lambda: ""
        return
    program, key = vllm.program().absolute(), secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = command_of(program, model.get_base_model().name_or_path, identity, settings, port)
    given = {**vllm_process.environment(key, os.environ), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    log = folder / "vllm.log"
    with vllm_process.running(command, given, url, log) as process:
        ended = f"vLLM has ended; what it said: {log}"
        yield f"{url}/v1", key, lambda: "" if process.poll() is None else ended


def command_of(program: Path, base: str, identity: BaseIdentity, settings: params.Train, port: int) -> list[str]:
    """What starts vLLM for a training: the base at its commit, in the trainer's precision, on a port of loopback."""
    hub = identity.revision if identity.revision and not Path(base).is_dir() else ""
    room = settings.max_prompt_tokens + settings.max_completion_tokens
    cpu = vllm.is_cpu_build(program)
    return [
        *(str(program), "serve", base, "--served-model-name", identity.name),
        *(("--revision", hub, "--tokenizer-revision", hub) if hub else ()),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", settings.dtype, "--max-model-len", str(room)),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", *_lora(settings)),
        *(("--enforce-eager",) if cpu else ("--gpu-memory-utilization", str(settings.rollouts.gpu_memory))),
    ]


def _lora(settings: params.Train) -> list[str]:
    """As many adapters as may be asked for at once, and the next."""
    kept = str(settings.staleness + 2)
    rank = str(adapter.max_lora_rank(settings.lora.rank))
    return ["--enable-lora", "--max-lora-rank", rank, "--max-loras", kept, "--max-cpu-loras", kept]


def _key(settings: params.Rollouts) -> str:
    if not settings.api_key_env:
        return ""
    if key := os.environ.get(settings.api_key_env):
        return key
    raise SettingsError(f"train.rollouts.api_key_env: the environment has no {settings.api_key_env}")
