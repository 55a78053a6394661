import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params
from gradeflow.errors import ProviderError, SettingsError, SetupError
from gradeflow.llm import Reply, connect
from gradeflow.llm.local import LocalClient
from gradeflow.llm.openai import OpenAIClient
from gradeflow.prompt import user

MODEL = params.Model(
    url="local", model="small", max_tokens=16, concurrency=8, cache="", input_cost=1.0, output_cost=10.0
)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 whose letters are bytes; a fifth of them end its reply."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("base") / "small"
    letters = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = list(range(1, len(letters), 15))
    model.save_pretrained(folder)
    return folder


def prompts(number: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 60))) for _ in range(number)]


def local(folder: Path, work: Any, **changes: Any) -> Any:
    async def run() -> Any:
        client = LocalClient(folder, MODEL.model_copy(update=changes))
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def chats(contents: list[str], **arguments: Any) -> Any:
    async def work(client: LocalClient) -> list[Reply]:
        return await asyncio.gather(*(client.chat(user(content), **arguments) for content in contents))

    return work


def generated(folder: Path, contents: list[str], room: int) -> list[list[int]]:
    """What `model.generate` writes, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    completions = []
    for content in contents:
        text = tokenizer.apply_chat_template(user(content), tokenize=False, add_generation_prompt=True)
        asked = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            whole = model.generate(**asked, max_new_tokens=room, do_sample=False)
        completions.append(whole[0, asked["input_ids"].shape[1] :].tolist())
    return completions


def test_a_batch_decodes_greedily_what_generate_does_for_each_prompt_alone(small_model: Path) -> None:
    from transformers import AutoTokenizer

    contents = prompts(12)
    expected = generated(small_model, contents, 30)
    replies = local(small_model, chats(contents, max_tokens=30))
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    ends = set(range(1, len(tokenizer), 15))
    for reply, tokens in zip(replies, expected, strict=True):
        ended = tokens[-1] in ends
        assert reply.completion_tokens == len(tokens)
        assert reply.finish_reason == ("stop" if ended else "length")
        assert reply.text == tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
    assert {reply.finish_reason for reply in replies} == {"stop", "length"}
    assert len({reply.completion_tokens for reply in replies}) > 5


def test_a_local_reply_counts_its_prompt_and_costs_what_settings_say(small_model: Path) -> None:
    (reply,) = local(small_model, chats(["hello"]), model="")
    assert reply.model == "small"
    assert reply.prompt_tokens == len("user: hello\nassistant:")
    assert reply.cost == pytest.approx((reply.prompt_tokens + 10 * reply.completion_tokens) / 1e6)


def test_calls_at_the_same_time_share_a_batch_of_limited_size(small_model: Path) -> None:
    sizes: list[int] = []

    async def work(client: LocalClient) -> None:
        reply = client._generator.reply
        client._generator.reply = lambda requests: sizes.append(len(requests)) or reply(requests)
        await chats(prompts(20))(client)

    local(small_model, work)
    assert sizes == [8, 8, 4]


def test_each_call_of_a_batch_has_its_own_limit_and_temperature(small_model: Path) -> None:
    async def work(client: LocalClient) -> list[Reply]:
        calls = [
            client.chat(user("abc"), max_tokens=2),
            client.chat(user("abc"), max_tokens=30),
            client.chat(user("abc"), max_tokens=30, temperature=2.0, seed=1),
        ]
        return await asyncio.gather(*calls)

    short, long, hot = local(small_model, work)
    (alone,) = local(small_model, chats(["abc"], max_tokens=30))
    assert short.completion_tokens <= 2
    assert long == alone.__class__(**{**_fields(alone), "seconds": long.seconds})
    assert hot.text != long.text


def _fields(reply: Reply) -> dict[str, Any]:
    return {name: getattr(reply, name) for name in Reply.__slots__}


def test_sampling_follows_its_seed_whatever_is_in_the_batch(small_model: Path) -> None:
    (alone,) = local(small_model, chats(["abc"], temperature=1.0, seed=3, max_tokens=30))
    crowd = local(small_model, chats([*prompts(6), "abc"], temperature=1.0, seed=3, max_tokens=30))
    other = local(small_model, chats(["abc"], temperature=1.0, seed=4, max_tokens=30))
    assert crowd[-1].text == alone.text
    assert other[0].text != alone.text


def test_a_nucleus_of_almost_nothing_is_greedy(small_model: Path) -> None:
    contents = prompts(4)
    greedy = local(small_model, chats(contents))
    sampled = local(small_model, chats(contents, temperature=1.0), top_p=1e-6)
    assert [reply.text for reply in sampled] == [reply.text for reply in greedy]


def test_sampling_without_a_seed_varies(small_model: Path) -> None:
    replies = local(small_model, chats(["abc"] * 6, temperature=2.0))
    assert len({reply.text for reply in replies}) > 1


def test_equal_greedy_questions_are_generated_once(small_model: Path) -> None:
    rows: list[int] = []

    async def work(client: LocalClient) -> None:
        reply = client._generator.reply
        client._generator.reply = lambda requests: rows.append(len(requests)) or reply(requests)
        first = await chats(["abc"] * 5)(client)
        later = await chats(["abc"], seed=9)(client)
        assert len({reply.text for reply in [*first, *later]}) == 1

    local(small_model, work)
    assert rows == [1]


def test_a_prompt_beyond_the_context_is_refused_alone(small_model: Path) -> None:
    async def work(client: LocalClient) -> list[Any]:
        calls = (client.chat(user(content)) for content in ("abc", "a" * 300))
        return await asyncio.gather(*calls, return_exceptions=True)

    fits, beyond = local(small_model, work)
    assert isinstance(fits, Reply)
    assert isinstance(beyond, ProviderError)
    assert beyond.cause == "too_long"


def test_a_model_that_breaks_is_a_fault_for_all_who_wait(small_model: Path) -> None:
    def broken(requests: Any) -> Any:
        raise RuntimeError("out of memory")

    async def work(client: LocalClient) -> list[Any]:
        client._generator.reply = broken
        calls = (client.chat(user(content)) for content in ("a", "b"))
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = local(small_model, work)
    assert [error.cause for error in errors] == ["server_error", "server_error"]


def test_a_closed_client_leaves_nobody_waiting(small_model: Path) -> None:
    async def work(client: LocalClient) -> Any:
        call = asyncio.ensure_future(client.chat(user("abc"), temperature=1.0))
        await asyncio.sleep(0)
        await client.close()
        return await asyncio.wait({call}, timeout=5)

    done, waiting = local(small_model, work)
    assert len(done) == 1
    assert not waiting


def test_a_folder_without_a_model_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="gradeflow base"):
        LocalClient(tmp_path, MODEL)


def test_connect_takes_the_base_for_local_and_a_server_for_a_url(small_model: Path) -> None:
    assert isinstance(connect(MODEL, small_model), LocalClient)
    assert isinstance(connect(params.Model(url="http://127.0.0.1:1/v1"), None), OpenAIClient)
    with pytest.raises(SettingsError, match="local"):
        connect(MODEL, None)
