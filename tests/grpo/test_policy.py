"""The trainer's own model as a policy: what it writes follows from prompt, seed and temperature alone."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gradeflow import models
from gradeflow.background import Background
from gradeflow.grpo.policy import Completion, LocalPolicy
from support import tiny

PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5, 4), (11,)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = tiny.settings(tmp_path_factory.mktemp("base"), train__max_completion_tokens=10)
    return (*models.load(settings.base), settings.train)


def written(made: Any, asked: Sequence[tuple[tuple[int, ...], int]], temperature: float = 1.0) -> list[Completion]:
    policy = LocalPolicy(*made)

    async def episode(prompt: tuple[int, ...], seed: int) -> Completion:
        try:
            return await policy.complete(prompt, seed, temperature, 0)
        finally:
            policy.end()

    with Background() as background:
        policy.begin(len(asked))
        futures = [background.start(episode(*each)) for each in asked]
        policy.serve(0)
        return [future.result() for future in futures]


def test_a_completion_depends_on_its_own_seed_and_not_on_those_beside_it(made: Any) -> None:
    asked = [(prompt, seed) for prompt in PROMPTS for seed in (1, 2, 3)]
    together = written(made, asked)
    alone = [written(made, [each])[0] for each in asked]
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert len({one.ids for one in together}) == len(asked)
    assert [one.ids for one in written(made, asked[::-1])] == [one.ids for one in together[::-1]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probabilities_are_those_of_the_tokens_at_the_temperature(made: Any, temperature: float) -> None:
    model, tokenizer, settings = made
    asked = [(PROMPTS[0], 1), (PROMPTS[1], 2)]
    assert [one.log_probs for one in written(made, asked, temperature)] == [(), ()]
    later = model, tokenizer, settings.model_copy(update={"staleness": 1})
    for (prompt, _), one in zip(asked, written(later, asked, temperature), strict=True):
        ids = torch.tensor([*prompt, *one.ids])
        with torch.no_grad():
            shares = (model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        expected = shares.gather(1, ids[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.log_probs), expected, rtol=1e-4, atol=1e-4)


def test_an_episode_of_several_turns_is_served_to_its_end(made: Any) -> None:
    policy = LocalPolicy(*made)
    turns: dict[int, list[int]] = {}

    async def episode(number: int) -> None:
        try:
            prompt: tuple[int, ...] = PROMPTS[0]
            for turn in range(number):
                one = await policy.complete(prompt, turn, 1.0, 0)
                turns.setdefault(number, []).append(len(one.ids))
                prompt = (*prompt, *one.ids, 5)
                await asyncio.sleep(0.01 * number)
        finally:
            policy.end()

    with Background() as background:
        policy.begin(3)
        futures = [background.start(episode(number)) for number in (1, 2, 3)]
        policy.serve(0)
        for future in futures:
            future.result()
    assert {number: len(each) for number, each in turns.items()} == {1: 1, 2: 2, 3: 3}


def test_a_completion_is_there_while_longer_ones_are_written(made: Any, tmp_path: Path) -> None:
    model, tokenizer, settings = made
    whole = written(made, [(PROMPTS[0], seed) for seed in range(4)])
    end = whole[0].ids[2]  # makes the first one end early
    order: list[int] = []
    policy = LocalPolicy(model, tokenizer, settings)
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = end
    steps: list[int] = []
    hook = model.register_forward_hook(lambda *_: steps.append(len(steps)))

    async def episode(seed: int) -> None:
        try:
            await policy.complete(PROMPTS[0], seed, 1.0, 0)
            order.append(len(steps))
        finally:
            policy.end()

    try:
        with Background() as background:
            policy.begin(4)
            futures = [background.start(episode(seed)) for seed in range(4)]
            policy.serve(0)
            for future in futures:
                future.result()
    finally:
        hook.remove()
        model.generation_config.eos_token_id = before
    assert min(order) < max(order)
