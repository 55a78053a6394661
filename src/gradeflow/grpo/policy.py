"""Who writes completions in training: the trainer's own model, decoded in the trainer's thread.

An episode runs in the background loop and asks its policy for one completion after the other; the trainer's thread,
which owns the model, serves what is asked. A completion depends on its own seed, not on what is written beside it.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gradeflow import params
from gradeflow.decode import Choose, decode, end_ids, sampler

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Completion:
    """Token ids, the one that ends it included, and their log-probabilities at the temperature that was asked for.

    There are none where the model that learns from it at once is the one that wrote it.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class Policy(Protocol):
    """What episodes write with. `begin` counts episodes that will ask, `end` one that will ask no more."""

    @property
    def own_model(self) -> bool:
        """Whether log-probabilities are the trainer's own, to the last bits."""

    def begin(self, episodes: int) -> None: ...

    async def complete(self, prompt: Sequence[int], seed: int, temperature: float, version: int) -> Completion: ...

    def end(self) -> None: ...

    def serve(self, version: int) -> None:
        """Write for the episodes that have begun; they need not have ended when it returns.

        `version` counts the updates of the weights that they are to be written with, and that they ask for.
        """


@dataclass(frozen=True, slots=True)
class _Call:
    prompt: tuple[int, ...]
    seed: int
    temperature: float
    loop: asyncio.AbstractEventLoop
    reply: "asyncio.Future[Completion]"

    def answer(self, completion: Completion) -> None:
        self.loop.call_soon_threadsafe(self._settle, completion)

    def _settle(self, completion: Completion) -> None:
        if not self.reply.done():
            self.reply.set_result(completion)


class LocalPolicy:
    """The trainer's model. `serve` decodes, in batches, until no episode asks any more."""

    own_model = True

    def __init__(self, model: Any, tokenizer: Any, settings: params.Train) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._changed = threading.Condition()
        self._asking = 0
        self._calls: list[_Call] = []

    def begin(self, episodes: int) -> None:
        with self._changed:
            self._asking += episodes

    async def complete(self, prompt: Sequence[int], seed: int, temperature: float, version: int) -> Completion:  # noqa: ARG002
        loop = asyncio.get_running_loop()
        call = _Call(tuple(prompt), seed, temperature, loop, loop.create_future())
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
        return await call.reply

    def end(self) -> None:
        with self._changed:
            self._asking -= 1
            self._changed.notify()

    def serve(self, version: int) -> None:  # noqa: ARG002 - the model is what it is
        settings = self._settings
        most = settings.prompts_per_step * settings.group_size * (1 + settings.staleness)
        while calls := self._next():
            for start in range(0, len(calls), most):
                self._write(calls[start : start + most])

    def _next(self) -> list[_Call]:
        """What is asked for, once all that ask are waiting."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._calls) >= self._asking)
            calls, self._calls = self._calls, []
        return sorted(calls, key=lambda call: (len(call.prompt), call.prompt))  # copies of a prompt side by side

    def _write(self, calls: Sequence[_Call]) -> None:
        prompts = list(dict.fromkeys(call.prompt for call in calls))
        copies = [sum(call.prompt == prompt for call in calls) for prompt in prompts]
        later = self._settings.staleness > 0 or self._settings.ppo_epochs > 1
        later = later and all(call.temperature > 0 for call in calls)  # from greedy ones nothing is learnt
        choose, log_probs = self._chooser(calls, measure=later)

        def ended(row: int, ids: list[int]) -> None:
            calls[row].answer(Completion(tuple(ids), tuple(log_probs[row, : len(ids)].tolist()) if later else ()))

        training = self._model.training
        self._model.eval()
        try:
            rooms = [self._settings.max_completion_tokens] * len(calls)
            decode(self._model, prompts, rooms, end_ids(self._model, self._tokenizer), choose, copies, ended)
        finally:
            self._model.train(training)

    def _chooser(self, calls: Sequence[_Call], *, measure: bool) -> "tuple[Choose, torch.Tensor]":
        """How tokens are drawn, and the table (N, T) of log-probabilities that fills as they are, to `measure` them."""
        import torch

        device, longest = self._model.device, self._settings.max_completion_tokens
        draws = torch.stack([torch.rand(longest, generator=torch.Generator().manual_seed(one.seed)) for one in calls])
        temperatures = torch.tensor([one.temperature for one in calls], device=device)
        draw = sampler(temperatures, draws.to(device), self._settings.top_p, self._settings.top_k)
        found = torch.zeros(len(calls), longest, device=device)
        if not measure:
            return draw, found

        def choose(logits: "torch.Tensor", rows: "torch.Tensor", step: int) -> "torch.Tensor":
            chosen = draw(logits, rows, step)
            shares = (logits.float() / temperatures[rows, None]).log_softmax(-1)
            found[rows, step] = shares.gather(-1, chosen[:, None])[:, 0]
            return chosen

        return choose, found
