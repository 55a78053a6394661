import asyncio
import random
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params
from gradeflow.errors import DataError, ProviderError, SettingsError, SetupError
from gradeflow.llm import LocalClient, OpenAIClient, Reply, ScriptedClient, connect
from gradeflow.prompt import user
from support.chat_server import ChatServer

ENDPOINT = params.Endpoint(
    url="local",
    model="small",
    api_key_env="",
    temperature=0.0,
    top_p=1.0,
    max_tokens=16,
    timeout_s=5.0,
    retries=2,
    concurrency=8,
    no_proxy=True,
    input_cost=1.0,
    output_cost=10.0,
)


def endpoint(**changes: Any) -> params.Endpoint:
    return ENDPOINT.model_copy(update=changes)


def ask(server: ChatServer, content: str = "hello", arguments: dict[str, Any] | None = None, **changes: Any) -> Reply:
    async def call() -> Reply:
        client = OpenAIClient(endpoint(url=server.url, **changes), backoff_s=0.001)
        try:
            return await client.chat(user(content), **(arguments or {}))
        finally:
            await client.close()

    return asyncio.run(call())


def failure(server: ChatServer, **changes: Any) -> ProviderError:
    with pytest.raises(ProviderError) as raised:
        ask(server, **changes)
    return raised.value


def test_a_reply_has_its_tokens_and_cost() -> None:
    with ChatServer() as server:
        reply = ask(server, "two words")
    assert (reply.text, reply.finish_reason, reply.model) == ("echo: two words", "stop", "small")
    assert (reply.prompt_tokens, reply.completion_tokens) == (2, 3)
    assert reply.cost == pytest.approx((2 * 1.0 + 3 * 10.0) / 1e6)
    assert reply.seconds > 0


def test_settings_of_the_endpoint_are_sent_and_arguments_take_their_place() -> None:
    with ChatServer() as server:
        ask(server, top_p=0.9)
        ask(server, arguments={"temperature": 0.5, "max_tokens": 3, "seed": 7})
    settings, arguments = server.bodies
    assert {"model": "small", "temperature": 0.0, "top_p": 0.9, "max_tokens": 16}.items() <= settings.items()
    assert "seed" not in settings
    assert {"temperature": 0.5, "max_tokens": 3, "seed": 7}.items() <= arguments.items()


@pytest.mark.parametrize("fault", ["429", "500", "503", "drop", "garbage", "html", "empty", "null", "no choices"])
def test_a_call_is_repeated_until_it_brings_a_usable_reply(fault: Any) -> None:
    with ChatServer(faults=[fault, fault, None]) as server:
        assert ask(server).text == "echo: hello"
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("fault", "cause", "tries"),
    [
        ("429", "rate_limit", 3),
        ("500", "server_error", 3),
        ("drop", "unreachable", 3),
        ("garbage", "server_error", 3),
        ("html", "server_error", 3),
        ("empty", "empty_reply", 3),
        ("null", "empty_reply", 3),
        ("no choices", "empty_reply", 3),
        ("refused", "empty_reply", 3),
        ("reasoning", "empty_reply", 3),
        ("cut", "truncated_reply", 3),
        ("400", "bad_request", 1),
        ("404", "bad_request", 1),
        ("401", "auth", 1),
    ],
)
def test_what_no_try_mends_ends_in_one_line_with_cause_and_url(fault: Any, cause: str, tries: int) -> None:
    with ChatServer(faults=lambda number, body: fault) as server:
        error = failure(server)
    assert error.cause == cause
    assert len(server.bodies) == tries
    assert server.url in str(error)
    assert "\n" not in str(error)


def test_a_server_that_stays_silent_is_a_timeout() -> None:
    with ChatServer(faults=lambda number, body: "timeout") as server:
        assert failure(server, timeout_s=0.1, retries=1).cause == "timeout"
    assert len(server.bodies) == 2


def test_a_server_that_is_not_there_is_unreachable() -> None:
    with ChatServer() as server:
        pass
    error = failure(server)
    assert error.cause == "unreachable"
    assert server.url in str(error)


@pytest.mark.parametrize("fault", ["cut", "reasoning"])
def test_a_reply_cut_off_is_asked_for_again_with_more_tokens_and_another_seed(fault: Any) -> None:
    with ChatServer(faults=lambda number, body: fault, enough=64) as server:
        reply = ask(server)
    assert reply.text == "echo: hello"
    assert [body["max_tokens"] for body in server.bodies] == [16, 32, 64]
    assert len({body.get("seed") for body in server.bodies}) == 3
    assert server.bodies[1]["temperature"] > 0
    assert reply.cost == pytest.approx((3 * 1.0 + (16 + 32 + 2) * 10.0) / 1e6)


def test_a_retry_that_asks_for_too_much_reports_what_was_wrong_at_first() -> None:
    with ChatServer(faults=["cut", "400"]) as server:
        assert failure(server).cause == "truncated_reply"


def test_a_key_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key-of-the-judge")
    with ChatServer(faults=["400", "401", "500"]) as server:
        errors = [failure(server, api_key_env="JUDGE_KEY", retries=0) for _ in range(3)]
    assert all(headers["authorization"] == "Bearer secret-key-of-the-judge" for headers in server.headers)
    assert not any("secret-key" in str(error) for error in errors)


def test_a_missing_key_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(SettingsError, match="JUDGE_KEY"):
        OpenAIClient(endpoint(url="http://127.0.0.1:1/v1", api_key_env="JUDGE_KEY"))


def test_a_proxy_of_the_environment_is_used_unless_settings_say_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with ChatServer() as server:
        assert failure(server, no_proxy=False, retries=0).cause == "unreachable"
        assert ask(server, no_proxy=True).text == "echo: hello"


def test_calls_in_flight_stay_within_the_limit() -> None:
    async def many(server: ChatServer) -> list[Reply]:
        client = OpenAIClient(endpoint(url=server.url, concurrency=3))
        replies = await asyncio.gather(*(client.chat(user(str(number))) for number in range(12)))
        await client.close()
        return replies

    with ChatServer(latency_s=0.03) as server:
        replies = asyncio.run(many(server))
    assert [reply.text for reply in replies] == [f"echo: {number}" for number in range(12)]
    assert server.peak == 3


@pytest.mark.parametrize(("temperature", "asked"), [(0.0, 1), (0.7, 5)])
def test_equal_requests_in_flight_are_answered_once_at_temperature_zero(temperature: float, asked: int) -> None:
    async def many(server: ChatServer) -> list[Reply]:
        client = OpenAIClient(endpoint(url=server.url, temperature=temperature))
        replies = await asyncio.gather(*(client.chat(user("same")) for _ in range(5)))
        await client.close()
        return replies

    with ChatServer(latency_s=0.05) as server:
        assert {reply.text for reply in asyncio.run(many(server))} == {"echo: same"}
    assert len(server.bodies) == asked


def test_one_who_stops_waiting_does_not_take_the_reply_from_the_others() -> None:
    async def two(server: ChatServer) -> Reply:
        client = OpenAIClient(endpoint(url=server.url))
        first, second = (asyncio.ensure_future(client.chat(user("same"))) for _ in range(2))
        await asyncio.sleep(0.02)
        first.cancel()
        reply = await second
        await client.close()
        return reply

    with ChatServer(latency_s=0.1) as server:
        assert asyncio.run(two(server)).text == "echo: same"


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
        client = LocalClient(folder, endpoint(**changes))
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
    assert beyond.cause == "bad_request"


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
        LocalClient(tmp_path, ENDPOINT)


def test_a_script_replies_in_order_and_keeps_what_it_was_asked() -> None:
    client = ScriptedClient(["one", ProviderError("down", cause="unreachable")])
    assert _run(client.chat(user("first"))).text == "one"
    with pytest.raises(ProviderError):
        _run(client.chat(user("second")))
    with pytest.raises(DataError, match="ends after 2"):
        _run(client.chat(user("third")))
    assert [call[0]["content"] for call in client.calls] == ["first", "second", "third"]


def test_a_script_can_be_a_function_of_the_messages() -> None:
    client = ScriptedClient(lambda messages: messages[-1]["content"].upper())
    assert _run(client.chat(user("loud"))).text == "LOUD"


def _run(call: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(call)


def test_connect_takes_the_base_for_local_and_a_server_for_a_url(small_model: Path) -> None:
    assert isinstance(connect(ENDPOINT, small_model), LocalClient)
    assert isinstance(connect(endpoint(url="http://127.0.0.1:1/v1"), None), OpenAIClient)
    with pytest.raises(SettingsError, match="local"):
        connect(ENDPOINT, None)


def test_importing_the_module_is_quick() -> None:
    import subprocess
    import sys

    heavy = "{'torch', 'transformers', 'openai'}"
    code = f"import sys, gradeflow.llm; sys.exit(len({heavy} & set(sys.modules)))"
    started = time.perf_counter()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert time.perf_counter() - started < 10
