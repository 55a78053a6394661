"""The real vLLM behind the gateway: the same names, headers and switches, and what our own server has not."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gradeflow import registry, serve
from gradeflow.adapter import vllm
from gradeflow.registry import Version
from gradeflow.serve import Server
from support import serving
from support.serving import QUESTION, ROOT, ask, await_version, directly, fuzz, register, settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not vllm.program(ROOT).is_file(), reason="no vLLM here: make vllm"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def versions(made: Path, _store_folder: Path) -> tuple[Version, Version]:
    serving.connect(_store_folder)
    return register(made / "adapter", "by-vllm", "champion"), register(made / "other", "by-vllm", "challenger")


@pytest.fixture(scope="module")
def server(
    made: Path, versions: tuple[Version, Version], _store_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    told: dict[str, Any] = {"models": ["by-vllm", "by-vllm@challenger"], "backend": "vllm"}
    loaded = settings(made, **told)
    store = loaded.tracking.model_copy(update={"uri": f"sqlite:///{_store_folder / 'mlflow.db'}"})
    loaded = loaded.model_copy(update={"tracking": store})
    with (
        contextlib.chdir(tmp_path_factory.mktemp("serving")),
        serve.serving(serve.find(loaded, "vllm"), loaded, ROOT) as started,
    ):
        yield started


@pytest.fixture
def client(server: Server, store: Path) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as opened:
        yield opened


def test_each_name_is_answered_by_its_adapter(
    made: Path, versions: tuple[Version, Version], client: openai.OpenAI
) -> None:
    assert [model.id for model in client.models.list().data] == [
        "by-vllm@champion",
        "by-vllm",
        "by-vllm/1",
        "by-vllm@challenger",
        "by-vllm/2",
    ]
    first, second = (ask(client, model=f"by-vllm/{one.version}") for one in versions)
    whole = directly(made, "What is 3 + 4?", 16, adapted=True)
    assert first.choices[0].message.content == whole.rstrip("\ufffd")  # vLLM leaves half a character out
    assert first.choices[0].message.content != second.choices[0].message.content
    for answer, one in ((first, versions[0]), (second, versions[1])):
        assert answer.system_fingerprint == one.digest[:12]
        assert answer.model == f"by-vllm/{one.version}"


def test_streams_completions_and_log_probabilities_are_those_of_vllm(
    versions: tuple[Version, Version], client: openai.OpenAI
) -> None:
    whole = ask(client, model="by-vllm").choices[0].message.content
    pieces = list(ask(client, model="by-vllm", stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    assert {(piece.model, piece.system_fingerprint) for piece in pieces} == {("by-vllm", versions[0].digest[:12])}
    told = client.completions.create(model="by-vllm", prompt="What?", max_tokens=4, temperature=0, logprobs=2)
    assert told.choices[0].logprobs is not None
    assert len(told.choices[0].logprobs.token_logprobs or []) == 4


def test_an_alias_is_followed(versions: tuple[Version, Version], client: openai.OpenAI) -> None:
    registry.set_alias(versions[1], "champion")
    await_version(client, versions[1], "by-vllm")
    registry.set_alias(versions[0], "champion")
    await_version(client, versions[0], "by-vllm")


def test_nothing_but_what_clients_need_is_exposed_and_metrics_name_versions(
    versions: tuple[Version, Version], server: Server, client: openai.OpenAI
) -> None:
    root = server.url.removesuffix("/v1")
    ask(client, model="by-vllm")
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/tokenize", "/docs", "/version"):
        assert httpx.post(root + path, json={}).status_code == 404
    metrics = httpx.get(f"{root}/metrics").text
    assert "vllm:" in metrics
    labels = f'adapter="{versions[0].digest[:12]}",model="by-vllm",status="200",version="1"'
    assert f"gradeflow_requests_total{{{labels}}}" in metrics


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": QUESTION, "temperature": "warm"},
        {"messages": QUESTION, "max_tokens": 65},
        {"messages": QUESTION, "top_logprobs": 10_000, "logprobs": True},
        {"messages": [{"role": "user", "content": "x" * 1000}]},
        {"messages": QUESTION, "logit_bias": {"99999999": 5}},
    ],
)
def test_a_bad_request_is_answered_in_the_shape_of_openai(server: Server, wrong: dict[str, Any]) -> None:
    reply = httpx.post(f"{server.url}/chat/completions", json={"model": "by-vllm", **wrong})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


def test_no_request_makes_it_fail(server: Server, client: openai.OpenAI, tmp_path: Path) -> None:
    before = ask(client, model="by-vllm").choices[0].message.content
    assert fuzz(server, tmp_path, "by-vllm") > 0
    assert ask(client, model="by-vllm").choices[0].message.content == before


@pytest.mark.parametrize(
    "keyed",
    [{"api_key_env": "TEST_KEY", "host": "0.0.0.0"}, {"vllm_args": ["--api-key", "another", "s3cret"]}],
    ids=["ours", "of vLLM"],
)
def test_a_key_is_asked_for_and_requests_in_flight_end(
    made: Path,
    versions: tuple[Version, Version],
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    keyed: dict[str, Any],
) -> None:
    monkeypatch.setenv("TEST_KEY", "s3cret")
    loaded = settings(made, models=["by-vllm"], backend="vllm", **keyed)
    uri = loaded.tracking.model_copy(update={"uri": f"sqlite:///{store / 'mlflow.db'}"})
    loaded = loaded.model_copy(update={"tracking": uri})
    asked = {"model": "by-vllm", "messages": QUESTION, "max_tokens": 64, "stream": True, "ignore_eos": True}
    with contextlib.ExitStack() as running, httpx.Client(timeout=60) as client:
        server = running.enter_context(serve.serving(serve.find(loaded, "vllm"), loaded, ROOT))
        assert client.get(f"{server.url}/models").status_code == 401
        key = {"Authorization": "Bearer s3cret"}
        with client.stream("POST", f"{server.url}/chat/completions", json=asked, headers=key) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            running.close()
            rest = [line for line in lines if line]
    assert json.loads(first.removeprefix("data: "))["model"] == "by-vllm"
    assert rest[-1] == "data: [DONE]"
