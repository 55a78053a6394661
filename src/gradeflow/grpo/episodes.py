"""Episodes of a policy: what it writes, turn by turn, and what the environment makes of it, in the background."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gradeflow import digest, models, params
from gradeflow.background import Background
from gradeflow.errors import ProviderError, SettingsError
from gradeflow.grpo.environment import Environment
from gradeflow.grpo.policy import Completion, Policy
from gradeflow.prompt import Message
from gradeflow.types import Event, Example, Rollout, Turn

Encode = Callable[[Sequence[Message]], Sequence[int]]
"""A conversation as token ids, ready for the reply."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Episode:
    """`turns` are there when the policy has written all, the `rollout` when that is graded."""

    turns: "Future[tuple[Turn, ...]]"
    rollout: "Future[Rollout]"


class Episodes:
    """Starts episodes. Whoever starts some lets the policy serve them."""

    def __init__(
        self,
        policy: Policy,
        encode: Encode,
        decode: Decode,
        environment: Environment,
        background: Background,
        settings: params.Train,
    ) -> None:
        self.policy = policy
        self.environment = environment
        self.encode = encode
        self.decode = decode
        self._background = background
        self.settings = settings

    def start(
        self, example: Example, seeds: Sequence[Sequence[Any]], version: int, temperature: float
    ) -> list[Episode]:
        """One for each of the seeds, of which there are as many as the policy was told to `begin`."""
        prompts: dict[tuple[str, ...], Sequence[int]] = {}
        return [self._started(example, _Writer(self, prompts, seed, version, temperature, None)) for seed in seeds]

    def go_on(self, example: Example, wrote: Sequence[Mapping[str, Any]], version: int, temperature: float) -> Episode:
        """One whose turns were `wrote` before an interruption, and are graded again."""
        return self._started(example, _Writer(self, {}, (), version, temperature, list(wrote)))

    def play(self, examples: Sequence[Example], version: int) -> list[Rollout]:
        """A greedy episode of each example, which nothing is learnt from."""
        self.policy.begin(len(examples))
        begun = [self.start(example, [()], version, 0.0)[0] for example in examples]
        self.policy.serve(version)
        with models.leaving_room():
            return [episode.rollout.result() for episode in begun]

    def _started(self, example: Example, writer: "_Writer") -> Episode:
        return Episode(writer.turns, self._background.start(self._episode(example, writer)))

    async def _episode(self, example: Example, writer: "_Writer") -> Rollout:
        try:
            graded = await self.environment.episode(example, writer)
        except BaseException as error:
            writer.done(error)
            raise
        writer.done()
        return Rollout(
            example,
            writer.turns.result(),
            graded.sample,
            graded.events,
            graded.reason,
            writer.version,
            writer.temperature,
            graded.cost,
        )


class _Writer:
    """Writes for one episode; `seed` is what its completions follow from. What `wrote` holds is written already."""

    def __init__(
        self,
        owner: Episodes,
        prompts: dict[tuple[str, ...], Sequence[int]],
        seed: Sequence[Any],
        version: int,
        temperature: float,
        wrote: list[Mapping[str, Any]] | None,
    ) -> None:
        self.turns: Future[tuple[Turn, ...]] = Future()
        self.version = version
        self.temperature = temperature
        self.events: tuple[Event, ...] = ()
        self._owner = owner
        self._prompts = prompts
        self._seed = seed
        self._wrote = wrote
        self._found: list[Turn] = []

    async def write(self, messages: Sequence[Message]) -> str:
        started, clock = time.time(), time.perf_counter()
        prompt = self._prompt(messages)
        completion = await self._complete(prompt)
        ids = tuple(completion.ids)
        text = self._owner.decode(ids)
        self._found.append(Turn(tuple(prompt), ids, (1,) * len(ids), text, tuple(completion.log_probs)))
        seconds = time.perf_counter() - clock
        asked = {"messages": [dict(message) for message in messages]}
        event = Event("policy", "policy", started, seconds, asked, {"text": text}, len(prompt), len(ids))
        self.events = (*self.events, event)
        return text

    def done(self, error: BaseException | None = None) -> None:
        if self.turns.done():
            return
        if self._wrote is None:
            self._owner.policy.end()
        if error is None:
            self.turns.set_result(tuple(self._found))
        else:
            self.turns.set_exception(error)

    async def _complete(self, prompt: Sequence[int]) -> Completion:
        if self._wrote is None:
            seed = int(digest.of_json([*self._seed, *([len(self._found)] if self._found else [])])[:15], 16)
            return await self._owner.policy.complete(prompt, seed, self.temperature, self.version)
        if len(self._found) == len(self._wrote):
            raise ProviderError("an interrupted episode takes another course than before", cause="not_repeated")
        kept = self._wrote[len(self._found)]
        return Completion(tuple(kept["ids"]), tuple(kept["log_probs"]))

    def _prompt(self, messages: Sequence[Message]) -> Sequence[int]:
        """Copies of an example begin alike, and are encoded once."""
        key = tuple(message["content"] for message in messages)
        if key not in self._prompts:
            self._prompts[key] = self._owner.encode(messages)
        found, most = self._prompts[key], self._owner.settings.max_prompt_tokens
        if len(found) > most:
            said = f"train.max_prompt_tokens is {most}; a prompt has {len(found)} tokens"
            raise ProviderError(said, cause="too_long") if self._found else SettingsError(said)
        return found
