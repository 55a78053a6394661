import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gradeflow import params
from gradeflow.errors import ProviderError, SettingsError
from gradeflow.llm import Reply
from gradeflow.llm.openai import OpenAIClient, _refused
from gradeflow.prompt import user
from support.chat_server import ChatServer

MODEL = params.Model(
    url="local",
    model="small",
    max_tokens=16,
    timeout_s=5.0,
    deadline_s=20.0,
    retries=2,
    concurrency=8,
    cache="",
    no_proxy=True,
    input_cost=1.0,
    output_cost=10.0,
)


def endpoint(**changes: Any) -> params.Model:
    return MODEL.model_copy(update=changes)


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


def test_a_busy_server_costs_a_call_no_tries_but_ends_at_its_deadline() -> None:
    with ChatServer(faults=["429"] * 9) as server:
        assert ask(server, retries=0).tries == 10
    with ChatServer(faults=lambda number, body: "429") as server:
        assert failure(server, deadline_s=0.1, retries=0).cause == "rate_limit"
    assert len(server.bodies) > 1


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


def chat_all(server: ChatServer, contents: list[str], **changes: Any) -> tuple[list[Any], OpenAIClient]:
    async def call() -> tuple[list[Any], OpenAIClient]:
        client = OpenAIClient(endpoint(url=server.url, **changes), backoff_s=0.01)
        replies = await asyncio.gather(*(client.chat(user(one)) for one in contents), return_exceptions=True)
        await client.close()
        return replies, client

    return asyncio.run(call())


def test_as_many_calls_run_as_the_server_takes_and_none_fails() -> None:
    with ChatServer(latency_s=0.3, most=20) as server:
        replies, client = chat_all(server, [f"{number}" for number in range(200)], concurrency=256)
    assert [str(getattr(reply, "text", reply)) for reply in replies] == [f"echo: {number}" for number in range(200)]
    assert 16 < server.peak <= 20
    assert server.refused < 100
    assert 12 <= client.pace.limit <= 30


def test_a_server_that_takes_fewer_from_now_on_costs_no_call() -> None:
    with ChatServer(latency_s=0.2, most=48) as server:  # a slow machine, too, has more than 4 calls running then

        def falls(number: int, body: dict[str, Any]) -> None:
            if number > 100:
                server.most = 4

        server.faults = falls
        replies, client = chat_all(server, [f"{number}" for number in range(160)], concurrency=128)
    assert all(isinstance(reply, Reply) for reply in replies)
    assert client.pace.limit <= 12


def test_the_context_of_the_model_bounds_what_is_asked_for() -> None:
    with ChatServer(context=40) as server:
        ask(server, "one two", max_tokens=16)
        ask(server, " ".join(["word"] * 20), max_tokens=32)
        with pytest.raises(ProviderError, match="the model's context has 40") as raised:
            ask(server, " ".join(["word"] * 39))
    assert [body["max_tokens"] for body in server.bodies] == [16, 20]
    assert raised.value.cause == "too_long"


def test_a_retry_never_asks_for_more_than_the_context_holds() -> None:
    with ChatServer(context=50, faults=["reasoning", "reasoning"]) as server:
        assert ask(server, "two words").text == "echo: two words"
    assert [body["max_tokens"] for body in server.bodies] == [16, 32, 48]


def test_the_server_s_own_word_on_a_prompt_that_is_too_long() -> None:
    said = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens"
    error = openai.BadRequestError(
        said, response=httpx.Response(400, request=httpx.Request("POST", "http://x")), body=None
    )
    assert _refused(error).cause == "too_long"


def in_a_process_of_its_own(settings: params.Model, ending: str) -> subprocess.CompletedProcess[str]:
    code = f"""if True:
        import asyncio, json, os
        from gradeflow import params
        from gradeflow.llm import connect
        from gradeflow.prompt import user
        client = connect(params.Model.model_validate_json({settings.model_dump_json()!r}), None)
        reply = asyncio.run(client.chat(user("hello")))
        {ending}"""
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


def test_replies_are_kept_for_other_processes(tmp_path: Path) -> None:
    with ChatServer() as server:
        first = ask(server, cache=str(tmp_path))
        said = "print(json.dumps([reply.text, reply.cached, client.usage.hits, client.usage.cost]))"
        done = in_a_process_of_its_own(endpoint(url=server.url, cache=str(tmp_path)), said)
        assert json.loads(done.stdout) == [first.text, True, 1, 0.0]
        assert len(server.bodies) == 1


def test_a_reply_is_kept_though_its_process_is_killed(tmp_path: Path) -> None:
    with ChatServer() as server:
        done = in_a_process_of_its_own(endpoint(url=server.url, cache=str(tmp_path)), "os.kill(os.getpid(), 9)")
        assert done.returncode == -9
        assert ask(server, cache=str(tmp_path)).cached
        assert len(server.bodies) == 1


def test_sampled_replies_are_kept_by_their_seed_alone(tmp_path: Path) -> None:
    with ChatServer() as server:
        for seed in (None, None, 1, 1, 2):
            ask(server, cache=str(tmp_path), arguments={"temperature": 0.5, "seed": seed})
        assert [body.get("seed") for body in server.bodies] == [None, None, 1, 2]


@pytest.mark.parametrize("change", [{"model": "other"}, {"top_p": 0.5}, {"max_tokens": 17}, {"temperature": 0.1}])
def test_another_question_is_not_answered_from_the_cache(change: dict[str, Any], tmp_path: Path) -> None:
    with ChatServer() as server:
        ask(server, cache=str(tmp_path))
        assert not ask(server, cache=str(tmp_path), **change).cached


def test_a_cache_that_breaks_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "replies.sqlite").write_bytes(b"no database" * 1000)
    with ChatServer() as server:
        assert ask(server, cache=str(tmp_path)).text == "echo: hello"
    assert "replies are not kept any more" in caplog.text


def test_no_key_reaches_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key-of-the-judge")
    with ChatServer(lambda messages: "your key is secret-key-of-the-judge") as server:
        ask(server, cache=str(tmp_path), api_key_env="JUDGE_KEY")
        ask(server, cache=str(tmp_path), api_key_env="JUDGE_KEY")
    assert len(server.bodies) == 2
    assert not any(b"secret-key-of" in path.read_bytes() for path in tmp_path.iterdir())


def test_a_key_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-a-file\n")
    with ChatServer() as server:
        ask(server, api_key_file=str(tmp_path / "key"))
    assert server.headers[0]["authorization"] == "Bearer from-a-file"
    (tmp_path / "key").write_text("\n")
    for name in ("key", "none"):
        with pytest.raises(SettingsError, match=f"api_key_file: {tmp_path / name}"):
            OpenAIClient(endpoint(url="http://127.0.0.1:1/v1", api_key_file=str(tmp_path / name)))


def test_what_was_asked_adds_up() -> None:
    with ChatServer(faults=["500", "cut"]) as server:
        _, client = chat_all(server, ["same", "same", "other two"], concurrency=1, retries=3)
    usage = client.usage
    assert (usage.calls, usage.hits, usage.tries) == (3, 1, 4)
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 2 + 3)
    assert usage.cost == pytest.approx((3 * 1.0 + 5 * 10.0 + 1 * 1.0 + 16 * 10.0) / 1e6, rel=0.2)
    with ChatServer(faults=lambda number, body: "empty") as server:
        _, client = chat_all(server, ["a"])
    assert client.usage.figures()["faults/empty_reply"] == 1


@pytest.mark.parametrize("schemas", [True, False])
def test_a_schema_is_sent_where_the_server_takes_one(schemas: bool) -> None:
    with ChatServer(schemas=schemas) as server:
        assert ask(server, arguments={"schema": {"type": "object"}}).text == "echo: hello"
    sent = [body.get("response_format", {}).get("type") for body in server.bodies]
    assert sent == (["json_schema"] if schemas else ["json_schema", None])


def test_what_a_server_has_no_use_for_is_left_out_from_then_on() -> None:
    """OpenAI's reasoning models take no max_tokens and no temperature."""
    with ChatServer(unsupported=["max_tokens", "temperature"]) as server:
        replies, _ = chat_all(server, ["one", "two"], concurrency=1)
    assert [reply.text for reply in replies] == ["echo: one", "echo: two"]
    taken = server.bodies[-1]
    assert len(server.bodies) == 4
    assert taken["max_completion_tokens"] == 16
    assert not {"max_tokens", "temperature"} & taken.keys()


def test_a_request_that_is_refused_for_another_reason_loses_nothing() -> None:
    with ChatServer(faults=["400", "400"]) as server:
        assert failure(server, concurrency=1).cause == "bad_request"
