import contextlib
import copy
from typing import Any

import pytest
import torch

from gradeflow import models
from gradeflow.decode import decode, greedy, sampler
from support import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load(tiny.settings(tmp_path_factory.mktemp("base")).base)[0].eval()


PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11]]


def generated(model: Any, prompt: list[int], room: int) -> list[int]:
    with torch.inference_mode():
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=room, do_sample=False, eos_token_id=[3])
    return list(whole[0, len(prompt) :].tolist())


def test_copies_of_a_prompt_are_what_each_copy_alone_would_be(model: Any) -> None:
    expected = [generated(model, prompt, 12) for prompt in PROMPTS]
    found = decode(model, PROMPTS, [12] * 6, [3], greedy, copies=[2, 1, 3])
    assert found == [expected[0]] * 2 + [expected[1]] + [expected[2]] * 3


def test_a_row_ends_at_its_own_room_or_end(model: Any) -> None:
    whole = decode(model, PROMPTS, [12] * 3, [], greedy)
    end = whole[1][4]
    found = decode(model, PROMPTS, [3, 12, 7], [end], greedy)
    until = [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert found == [until[0][:3], until[1], until[2][:7]]


@pytest.mark.parametrize("rank", [2, 8])
@pytest.mark.parametrize("off", [False, True])
def test_an_adapter_that_is_not_merged_writes_as_peft_would(model: Any, rank: int, off: bool) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=3.0, target_modules="all-linear")
    adapted: Any = get_peft_model(copy.deepcopy(model), config).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    seen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, rows: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(logits)
        return greedy(logits, rows, step)

    with adapted.disable_adapter() if off else contextlib.nullcontext():
        (found,) = decode(adapted, PROMPTS[:1], [8], [], choose)
        with torch.inference_mode():
            whole = adapted(torch.tensor([PROMPTS[0] + found])).logits[0]
    torch.testing.assert_close(torch.cat(seen), whole[len(PROMPTS[0]) - 1 : -1], rtol=1e-4, atol=1e-4)
    own = generated(model, PROMPTS[0], 8)
    assert (found == own) is off


def drawn(logits: torch.Tensor, temperature: float, **limits: Any) -> torch.Tensor:
    """Shares of 20,000 draws from one row of logits."""
    number = 20_000
    draws = torch.rand(number, 1, generator=torch.Generator().manual_seed(0))
    choose = sampler(torch.full((number,), temperature), draws, **limits)
    words = choose(logits.expand(number, -1), torch.arange(number), 0)
    return torch.bincount(words, minlength=logits.shape[-1]) / number


LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_words_come_as_often_as_the_softmax_says(temperature: float) -> None:
    assert torch.allclose(drawn(LOGITS, temperature), (LOGITS / temperature).softmax(-1), atol=0.015)


def test_a_temperature_of_0_is_greedy() -> None:
    assert drawn(LOGITS, 0.0)[1] == 1


def test_top_k_keeps_the_likeliest_words_in_proportion() -> None:
    expected = torch.tensor([0.0, 2.0, 1.0, 0.0]).exp() * torch.tensor([0, 1, 1, 0])
    assert torch.allclose(drawn(LOGITS, 1.0, top_k=2), expected / expected.sum(), atol=0.015)


def test_top_p_keeps_the_fewest_words_that_reach_it() -> None:
    """The shares are 0.09, 0.64, 0.24 and 0.03: 0.7 needs two words."""
    expected = torch.tensor([0.0, 2.0, 1.0, 0.0]).exp() * torch.tensor([0, 1, 1, 0])
    assert torch.allclose(drawn(LOGITS, 1.0, top_p=0.7), expected / expected.sum(), atol=0.015)
