"""Servers whose aliases move, whose registry is away, whose clients are slow, rude or many."""

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlflow
import openai
import pytest

from gradeflow import registry, serve
from gradeflow.errors import TrackingError
from gradeflow.registry import Version
from gradeflow.serve import Server
from gradeflow.server import catalogue
from support import serving
from support.serving import QUESTION, ask, await_version, directly, find, register, settings

NAME = "followed"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def versions(made: Path, _store_folder: Path) -> tuple[Version, Version]:
    serving.connect(_store_folder)
    return register(made / "adapter", NAME, "champion"), register(made / "other", NAME)


@pytest.fixture
def first(versions: tuple[Version, Version], store: Path) -> Version:
    """The champion, at the start of each test."""
    registry.set_alias(versions[0], "champion")
    return versions[0]


@contextlib.contextmanager
def server(made: Path, *models: str, **changed: Any) -> Iterator[tuple[Server, openai.OpenAI]]:
    told: dict[str, Any] = {"models": list(models or [f"{NAME}@champion"]), **changed}
    with (
        serve.serving(find(made, **told), settings(made, **told)) as started,
        openai.OpenAI(base_url=started.url, api_key="none", max_retries=0) as client,
    ):
        yield started, client


def asked(client: openai.OpenAI, model: str = NAME, **more: Any) -> Any:
    return ask(client, model=model, **more)


def test_an_alias_that_moves_is_followed_within_a_second_and_fixed_versions_stay(
    made: Path, versions: tuple[Version, Version], first: Version
) -> None:
    _, second = versions
    with server(made) as (_, client):
        before = asked(client).choices[0].message.content
        registry.set_alias(second, "champion")
        moved = time.monotonic()
        await_version(client, second, NAME)
        assert time.monotonic() - moved < 1
        after = asked(client).choices[0].message.content
        assert after == asked(client, f"{NAME}/{second.version}").choices[0].message.content != before
        assert asked(client, f"{NAME}/{first.version}").choices[0].message.content == before
        registry.set_alias(first, "champion")
        await_version(client, first, NAME)
        assert asked(client).choices[0].message.content == before


def test_no_request_fails_through_many_switches_and_each_is_answered_by_one_version(
    made: Path, versions: tuple[Version, Version], first: Version
) -> None:
    by_digest = {one.digest: folder for one, folder in zip(versions, ("adapter", "other"), strict=True)}
    texts: dict[str, set[str]] = {digest: set() for digest in by_digest}
    seen: Counter[str] = Counter()
    over = threading.Event()

    def load(client: openai.OpenAI) -> None:
        while not over.is_set():
            reply = client.chat.completions.with_raw_response.create(
                model=NAME, messages=QUESTION, temperature=0, max_tokens=4
            )
            digest = reply.headers["x-gradeflow-adapter"]
            answer = reply.parse()
            assert answer.system_fingerprint == digest[:12]
            texts[digest].add(str(answer.choices[0].message.content))
            seen[digest] += 1

    with server(made) as (_, client), ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(load, client) for _ in range(4)]
        try:
            for turn in range(1, 7):
                registry.set_alias(versions[turn % 2], "champion")
                await_version(client, versions[turn % 2], NAME)
                time.sleep(0.1)
        finally:
            over.set()
        for task in tasks:
            task.result()
    assert set(seen) == set(by_digest)
    assert [len(found) for found in texts.values()] == [1, 1]
    assert texts[versions[0].digest] != texts[versions[1].digest]


def test_a_stream_that_has_begun_ends_with_the_version_it_began_with(
    made: Path, versions: tuple[Version, Version], first: Version
) -> None:
    with server(made) as (_, client):
        whole = asked(client, max_tokens=48).choices[0].message.content
        stream = asked(client, max_tokens=48, stream=True)
        pieces = [next(iter(stream))]
        registry.set_alias(versions[1], "champion")
        await_version(client, versions[1], NAME)
        pieces += stream
    assert {piece.system_fingerprint for piece in pieces} == {first.digest[:12]}
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    assert pieces[-1].choices[0].finish_reason == "length"


def test_what_was_left_behind_is_unloaded_but_not_under_a_reply(
    made: Path, versions: tuple[Version, Version], first: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "KEPT", 0)
    left, now = (register(made / kind, "forgetting") for kind in ("adapter", "other"))

    def move(client: openai.OpenAI, version: Version) -> None:
        registry.set_alias(version, "champion")
        await_version(client, version, "forgetting")

    registry.set_alias(left, "champion")
    with server(made, "forgetting") as (_, client):
        whole = asked(client, "forgetting", max_tokens=48).choices[0].message.content
        stream = asked(client, "forgetting", max_tokens=48, stream=True)
        pieces = [next(iter(stream))]
        move(client, now)
        pieces += stream
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
        deadline = time.monotonic() + 10
        while "forgetting/1" in [one.id for one in client.models.list().data]:
            assert time.monotonic() < deadline
        with pytest.raises(openai.NotFoundError):
            asked(client, "forgetting/1")
        assert asked(client, "forgetting/2").choices
        move(client, left)
        assert asked(client, "forgetting", max_tokens=48).choices[0].message.content == whole


def test_a_version_that_is_not_what_was_registered_is_refused_and_the_old_one_goes_on(
    made: Path, versions: tuple[Version, Version], first: Version
) -> None:
    told = json.dumps({"dtype": "float32", "changes": [0.5] * 60})
    wrong = register(made / "other", "refusing", "challenger", **{registry.FINGERPRINT: told})
    good = register(made / "adapter", "refusing", "champion")
    with server(made, "refusing@champion") as (started, client):
        registry.set_alias(wrong, "champion")
        deadline = time.monotonic() + 10
        while True:
            raw = client.chat.completions.with_raw_response.create(
                model="refusing", messages=QUESTION, temperature=0, max_tokens=2
            )
            assert raw.headers["x-gradeflow-adapter"] == good.digest
            if said := raw.headers.get("x-gradeflow-refused"):
                break
            assert time.monotonic() < deadline
        assert said.startswith(f"version {wrong.version}: ")
        assert "its fingerprint differs" in said
        root = started.url.removesuffix("/v1")
        ready = httpx.get(f"{root}/ready").json()
        assert ready["ready"]
        assert "its fingerprint differs" in ready["refused"]["refusing@champion"]
        metrics = httpx.get(f"{root}/metrics").text
        assert f'gradeflow_refusals_total{{name="refusing@champion",version="{wrong.version}"}}' in metrics
        registry.set_alias(good, "champion")
        time.sleep(0.3)
        assert not httpx.get(f"{root}/ready").json()["refused"]


def test_several_adapters_share_a_base_and_answer_for_themselves(
    made: Path, versions: tuple[Version, Version], first: Version
) -> None:
    models = [f"{NAME}/{one.version}" for one in versions]
    with server(made, *models) as (_, client), ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda turn: asked(client, models[turn % 2]).choices[0].message.content, range(16)))
        names = [model.id for model in client.models.list().data]
    assert names == models
    assert told[0] == directly(made, "What is 3 + 4?", 16, adapted=True)
    assert set(told[::2]) == {told[0]}
    assert set(told[1::2]) == {told[1]} != {told[0]}


def test_a_registry_that_is_away_changes_nothing(made: Path, first: Version, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a store that does not answer."""

    def away(name: str) -> dict[str, int]:
        raise TrackingError("sqlite: gone")

    with server(made) as (started, client):
        monkeypatch.setattr(registry, "aliases", away)
        time.sleep(0.2)
        assert asked(client).system_fingerprint == first.digest[:12]
        ready = httpx.get(started.url.removesuffix("/v1") + "/ready").json()
    assert (ready["ready"], ready["registry"]) == (True, "sqlite: gone")


def test_log_probabilities_are_those_of_the_model(made: Path, first: Version) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with server(made) as (_, client):
        told = asked(client, max_tokens=6, logprobs=True, top_logprobs=3).choices[0].logprobs.content
        sampled = asked(client, max_tokens=6, temperature=1.5, seed=3, logprobs=True).choices[0].logprobs.content
        assert asked(client, max_tokens=6).choices[0].logprobs is None
        streamed = [
            piece.choices[0].logprobs.content
            for piece in asked(client, max_tokens=6, logprobs=True, top_logprobs=3, stream=True)
            if piece.choices[0].logprobs
        ]
        assert streamed == [told]
    base = made / "models" / serving.BASE
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(made / "adapter"))
    tokens = torch.tensor([tokenizer("<user>What is 3 + 4?\n<assistant>")["input_ids"]])
    for one in told:
        with torch.no_grad():
            likely = model(tokens).logits[0, -1].log_softmax(-1)
        values, places = likely.topk(3)
        assert one.logprob == pytest.approx(float(values[0]), abs=1e-4)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
        assert [top.token for top in one.top_logprobs] == [tokenizer.decode([place]) for place in places]
        assert one.token == one.top_logprobs[0].token
        tokens = torch.cat([tokens, places[None, :1]], 1)
    assert len(sampled) == 6
    assert all(one.logprob < 0 and one.top_logprobs == [] for one in sampled)


def test_what_is_too_large_too_slow_or_too_much_is_refused_and_harms_no_other(made: Path, first: Version) -> None:
    with server(made, max_request_kib=1, max_concurrency=2) as (started, client):
        with pytest.raises(openai.APIStatusError, match="more than 1024 bytes") as caught:
            asked(client, content="x" * 2000)
        assert caught.value.status_code == 413
        for name in ("n", "max_tokens", "best_of"):
            with pytest.raises(openai.BadRequestError, match=f"{name} is 99999; at most"):
                asked(client, extra_body={name: 99999})
        address = httpx.URL(started.url)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        with contextlib.ExitStack() as opened:
            for _ in range(4):
                slow = opened.enter_context(socket.create_connection((address.host, address.port)))
                slow.sendall(head + b"{")
            assert asked(client, max_tokens=1).choices
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda _: _asked_or_refused(client), range(32)))
    refused = [one for one in told if one is not None]
    assert 0 < len(refused) < 32
    assert {one.response.headers["retry-after"] for one in refused} == {"1"}


def _asked_or_refused(client: openai.OpenAI) -> openai.RateLimitError | None:
    try:
        asked(client, max_tokens=32)
    except openai.RateLimitError as error:
        return error
    return None


def test_only_what_clients_need_is_exposed_and_the_key_is_asked_for_everywhere_but_at_the_doors(
    made: Path, first: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", "s3cret")
    with server(made, api_key_env="TEST_KEY") as (started, _):
        root = started.url.removesuffix("/v1")
        statuses = {
            path: (
                httpx.get(root + path).status_code,
                httpx.get(root + path, headers={"Authorization": "Bearer s3cret"}).status_code,
            )
            for path in ("/health", "/ready", "/metrics", "/v1/models", "/docs", "/v1/load_lora_adapter", "/tokenize")
        }
    assert statuses == {
        "/health": (200, 200),
        "/ready": (200, 200),
        "/metrics": (401, 200),
        "/v1/models": (401, 200),
        "/docs": (401, 404),
        "/v1/load_lora_adapter": (401, 404),
        "/tokenize": (401, 404),
    }


def test_requests_are_traced_by_sampling_and_counted_by_version(made: Path, first: Version) -> None:
    with server(made, trace_share=1.0) as (started, client):
        asked(client, content="Remember this one?")
        metrics = httpx.get(started.url.removesuffix("/v1") + "/metrics").text
        labels = f'adapter="{first.digest[:12]}",model="{NAME}",status="200",version="{first.version}"'
        assert f"gradeflow_requests_total{{{labels}}}" in metrics
        deadline = time.monotonic() + 20
        experiment = str(mlflow.get_experiment_by_name(serving.EXPERIMENT).experiment_id)
        chosen = f"tags.`gradeflow.adapter.digest` = '{first.digest}'"
        while not (found := mlflow.search_traces([experiment], chosen, return_type="list", max_results=5)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert found[0].info.tags["gradeflow.serve.version"] == f"{NAME}/{first.version}"
    assert "Remember this one?" in found[0].info.request_preview
