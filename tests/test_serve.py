import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gradeflow import adapter, params, registry, serve, tracking
from gradeflow.errors import AdapterError, SettingsError, SetupError
from gradeflow.registry import Version
from gradeflow.serve import Found, Server
from gradeflow.server import catalogue
from gradeflow.server.catalogue import Reference, Served
from support import serving
from support.serving import BASE, QUESTION, ROOT, ask, directly, find, register, settings, start


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def policy(made: Path, _store_folder: Path) -> Version:
    """The registered champion of `policy`."""
    serving.connect(_store_folder)
    return register(made / "adapter", alias="champion")


@pytest.fixture(scope="module")
def server(made: Path, policy: Version, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with contextlib.chdir(tmp_path_factory.mktemp("serving")), serve.serving(find(made), settings(made)) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as opened:
        yield opened


def test_the_champion_answers_and_not_the_base(made: Path, client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    assert text == directly(made, "What is 3 + 4?", 16, adapted=True)
    assert text != directly(made, "What is 3 + 4?", 16, adapted=False)


def test_an_answer_names_its_adapter_and_counts_its_tokens(policy: Version, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="policy@champion", messages=QUESTION, temperature=0, max_tokens=5
    )
    answer = raw.parse()
    assert raw.headers["x-gradeflow-adapter"] == policy.digest
    assert raw.headers["x-gradeflow-version"] == f"policy/{policy.version}"
    assert answer.system_fingerprint == policy.digest[:12]
    assert answer.model == "policy@champion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user>What is 3 + 4?\n<assistant>")
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_the_model_is_listed_under_its_names_with_its_digest(policy: Version, client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["policy@champion", "policy", "policy/1"]
    assert {model.model_extra["digest"] for model in models if model.model_extra} == {policy.digest}
    assert client.models.retrieve("policy/1").id == "policy/1"


@pytest.mark.parametrize("name", ["policy@champion", "policy", "policy/1", "models:/policy@champion"])
def test_every_name_answers_alike(client: openai.OpenAI, name: str) -> None:
    assert ask(client, model=name).choices[0].message.content == ask(client).choices[0].message.content


def test_answers_do_not_depend_on_who_else_asks(client: openai.OpenAI) -> None:
    questions = [f"What is {'1' * length} + 4?" for length in range(1, 13)]
    alone = [ask(client, question).choices[0].message.content for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(lambda question: ask(client, question).choices[0].message.content, questions))
    assert together == alone


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI) -> None:
    first, again, other = (ask(client, temperature=1.5, seed=seed).choices[0].message.content for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_an_answer_ends_before_a_stop(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    reply = ask(client, stop=[text[3:5]], logprobs=True)
    (answer,) = reply.choices
    assert answer.message.content == text[: text.index(text[3:5])]
    assert answer.finish_reason == "stop"
    assert reply.usage.completion_tokens == len(answer.logprobs.content) < 16
    pieces = list(ask(client, stop=[text[3:5]], stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer.message.content
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_a_reply_is_no_longer_than_the_model_reads(client: openai.OpenAI) -> None:
    answer = ask(client, "x" * 220, max_tokens=64)
    assert answer.usage.total_tokens <= 256


@pytest.mark.parametrize(
    "message", [{"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": "7"}]
)
def test_all_roles_of_a_chat_are_taken(client: openai.OpenAI, message: Any) -> None:
    assert ask_all(client, [message, *QUESTION]).choices[0].message.role == "assistant"


def test_text_may_come_in_parts(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 4?"}]
    whole = ask_all(client, [{"role": "user", "content": parts}])
    assert whole.choices[0].message.content == ask(client).choices[0].message.content


def ask_all(client: openai.OpenAI, messages: list[Any]) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, temperature=0, max_tokens=16)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4o' is not served here; there are: policy@champion") as caught:
        ask(client, model="gpt-4o")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("policy/4")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"temperature": 3}, "temperature: .*less than or equal to 2"),
        ({"max_tokens": 0}, "max_tokens: .*greater than 0"),
        ({"max_tokens": 65}, "max_tokens is 65; at most 64 here"),
        ({"max_completion_tokens": 65}, "at most 64 here"),
        ({"top_logprobs": 2}, "top_logprobs: needs logprobs"),
        ({"n": 2}, "n: "),
        ({"extra_body": {"top_k": 5}}, "top_k: Extra inputs"),
        ({"seed": 2**70}, "seed: "),
        ({"content": "x" * 300}, "the messages are 318 tokens long; the model takes 256"),
    ],
)
def test_a_bad_request_says_what_is_wrong(client: openai.OpenAI, more: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(client, more.pop("content", "Hi"), **more)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff",
        b"{}",
        b'{"model": "policy", "messages": []}',
        b'{"model": "policy", "messages": [{"role": "wizard", "content": "hi"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": null}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "hi"}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}], "\\ud800": 1}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
        b'{"model": "policy", "messages": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    ],
)
def test_what_is_no_request_is_answered_in_the_shape_of_openai(server: Server, body: bytes) -> None:
    reply = httpx.post(f"{server.url}/chat/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("PUT", "/chat/completions", 405)])
def test_an_unknown_route_is_answered_in_the_shape_of_openai(
    server: Server, method: str, path: str, status: int
) -> None:
    reply = httpx.request(method, server.url + path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_health_needs_no_key(server: Server) -> None:
    reply = httpx.get(server.url.removesuffix("/v1") + "/health")
    assert reply.json() == {"status": "ok"}
    assert httpx.get(server.url.removesuffix("/v1") + "/ready").json()["ready"]


def test_the_key_is_asked_for(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "s3cret")
    with serve.serving(find(made), settings(made, host="0.0.0.0", api_key_env="TEST_KEY")) as started:
        assert started.url.startswith("http://127.0.0.1:")
        with (
            openai.OpenAI(base_url=started.url, api_key="wrong", max_retries=0) as wrong,
            pytest.raises(openai.AuthenticationError, match="a valid API key is needed"),
        ):
            ask(wrong)
        with openai.OpenAI(base_url=started.url, api_key="s3cret", max_retries=0) as right:
            assert ask(right).choices[0].message.content


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_that_others_reach_needs_a_key(made: Path, host: str) -> None:
    with pytest.raises(SettingsError, match=r"serve\.host: .* must send a key"):
        start(made, host=host)


def test_a_key_that_is_not_exported_is_missed_everywhere(made: Path) -> None:
    with pytest.raises(SettingsError, match=r"serve\.api_key_env: the environment has no UNSET_KEY"):
        start(made, api_key_env="UNSET_KEY")


def test_a_taken_port_is_named(made: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
            start(made, port=port)


def test_a_stopped_server_is_gone(made: Path, policy: Version, store: Path) -> None:
    with serve.serving(find(made), settings(made)) as started:
        assert started.alive()
    assert not started.alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{started.url}/models")


def test_an_adapter_that_does_nothing_is_refused_by_its_files(made: Path, store: Path) -> None:
    register(made / "zero", "idle", "champion")
    with pytest.raises(AdapterError, match="does nothing"):
        find(made, models=["idle@champion"])


def test_an_adapter_that_does_something_else_once_it_is_loaded_is_refused(made: Path, store: Path) -> None:
    told = json.dumps({"dtype": "float32", "changes": [0.5] * 60})
    register(made / "adapter", "changed", "champion", **{registry.FINGERPRINT: told})
    with pytest.raises(AdapterError, match="does not do to probabilities what it did when it was evaluated"):
        start(made, models=["changed@champion"])


def test_an_adapter_that_is_not_the_registered_one_is_refused(made: Path, policy: Version, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="was registered as ffffffffffff"):
        catalogue.fetch(replace(policy, digest="f" * 64), settings(made).base, tmp_path, "hf")


def based_on(made: Path, folder: Path, name: str, base: str, revision: str = "") -> None:
    shutil.copytree(made / "adapter", folder)
    adapter.stamp(folder, adapter.BaseIdentity(base, revision, "d"))
    register(folder, name, "champion")


def test_a_base_that_is_not_here_is_named(made: Path, store: Path, tmp_path: Path) -> None:
    based_on(made, tmp_path / "adapter", "baseless", "gradeflow-base-ffffffffffff")
    with pytest.raises(SetupError, match="gradeflow-base-ffffffffffff"):
        find(made, models=["baseless@champion"])


def test_adapters_of_two_bases_are_served_apart(made: Path, policy: Version, store: Path, tmp_path: Path) -> None:
    based_on(made, tmp_path / "adapter", "hub", "Qwen/Qwen2.5-0.5B-Instruct", "7ae5576")
    found = find(made, models=["hub@champion"])
    assert (found.base, found.revision) == ("Qwen/Qwen2.5-0.5B-Instruct", "7ae5576")
    with pytest.raises(SettingsError, match=r"one base, and policy@champion is of .*; hub@champion is of Qwen"):
        find(made, models=["policy@champion", "hub@champion"])


def test_a_base_that_is_not_whole_is_named(made: Path, policy: Version, store: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "models" / BASE, tmp_path / BASE, ignore=shutil.ignore_patterns("*.safetensors"))
    broken = replace(find(made), base=str(tmp_path / BASE))
    with pytest.raises(SetupError, match=f"base .*{BASE}: cannot be loaded"), serve.serving(broken, settings(made)):
        pass


@pytest.mark.parametrize(
    ("reference", "names"),
    [
        ("policy@champion", ("policy@champion", "policy")),
        ("models:/policy@champion", ("policy@champion", "policy")),
        ("policy", ("policy@champion", "policy")),
        ("policy@challenger", ("policy@challenger",)),
        ("policy/3", ("policy/3",)),
    ],
)
def test_a_reference_has_its_names(reference: str, names: tuple[str, ...]) -> None:
    assert Reference.of(reference).names == names


@pytest.mark.parametrize("reference", ["", "@champion", "policy@", "policy/x", "policy/0", "/3"])
def test_what_is_no_reference_is_refused(reference: str) -> None:
    with pytest.raises(SettingsError, match="names no registered adapter; expected name@alias or name/3"):
        Reference.of(reference)


CHAMPION = Reference("p", "champion")
HUB = Found(
    {CHAMPION: Served(Version("p", 3, "m-1", "d" * 64, {}), Path("/cache/abc"), 64)},
    "Qwen/Qwen2.5-7B-Instruct",
    "a09a",
    64,
)


def command(found: Found = HUB, *, cpu: bool = False, **changed: Any) -> list[str]:
    section = params.load(ROOT / "params.yaml").serve.model_copy(update=changed)
    return serve.vllm_command(Path("bin/vllm"), found, section, 8000, cpu=cpu)


def test_vllm_gets_the_base_at_its_commit_and_no_adapter() -> None:
    assert command() == [
        *("bin/vllm", "serve", "Qwen/Qwen2.5-7B-Instruct"),
        *("--revision", "a09a", "--tokenizer-revision", "a09a"),
        *("--served-model-name", "base", "--host", "127.0.0.1", "--port", "8000"),
        *("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2"),
        *("--shutdown-timeout", "25", "--middleware", "gradeflow.server.vllm.Middleware"),
    ]


def test_vllm_on_cpu_runs_eagerly_in_float32_and_takes_more_arguments() -> None:
    more = command(cpu=True, vllm_args=["--max-model-len", "1024"])
    assert more[-5:] == ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]


@pytest.mark.parametrize(
    ("rank", "chosen"), [(1, "1"), (2, "8"), (8, "8"), (9, "16"), (65, "128"), (257, "320"), (512, "512")]
)
def test_vllm_takes_the_next_rank_that_it_knows(rank: int, chosen: str) -> None:
    told = command(replace(HUB, largest=rank))
    assert told[told.index("--max-lora-rank") + 1] == chosen


def test_a_rank_beyond_vllm_is_refused() -> None:
    with pytest.raises(AdapterError, match="rank 513; vLLM takes at most 512"):
        command(replace(HUB, largest=513))


def test_the_largest_rank_of_all_versions_counts(made: Path, store: Path) -> None:
    register(made / "other", "ranks", **{registry.RANK: "24"})
    register(made / "adapter", "ranks", "champion")
    assert find(made, models=["ranks"]).largest == 24


def test_vllm_that_is_asked_for_and_not_there_is_missed(made: Path, policy: Version, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="make vllm"):
        start(made, tmp_path, backend="vllm")


STAND_IN = f"""#!{sys.executable}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
print("starting", flush=True)
if os.environ.get("STAND_IN") == "broken":
    sys.exit("ValueError: no such model")
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        refused = {{"policy@champion": "it is idle"}} if os.environ.get("STAND_IN") == "idle" else {{}}
        self.reply({{"ready": not refused, "refused": refused}})
    def reply(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def with_vllm(tmp_path: Path) -> Path:
    """A folder whose .venv-vllm/bin/vllm speaks as much of vLLM as starting it takes."""
    program = adapter.vllm.program(tmp_path)
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def test_vllm_is_taken_where_it_is_and_stopped_at_the_end(
    made: Path, policy: Version, store: Path, with_vllm: Path
) -> None:
    with serve.serving(find(made), settings(made, backend="auto"), with_vllm) as started:
        assert started.backend == "vllm"
        assert started.alive()
    assert not started.alive()


def test_vllm_beside_the_interpreter_is_taken_as_in_the_image(
    made: Path, policy: Version, store: Path, with_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = adapter.vllm.program(with_vllm).with_name("python")
    beside.symlink_to(sys.executable)
    found = find(made)
    monkeypatch.setattr("sys.executable", str(beside))
    with serve.serving(found, settings(made, backend="auto"), tmp_path / "elsewhere") as started:
        assert started.backend == "vllm"


def test_what_vllm_refuses_at_the_start_is_told(
    made: Path, policy: Version, store: Path, with_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "idle")
    with pytest.raises(AdapterError, match="policy@champion: it is idle"):
        start(made, with_vllm, backend="vllm")


def test_a_vllm_that_does_not_start_is_quoted(
    made: Path, policy: Version, store: Path, with_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "broken")
    with pytest.raises(SetupError, match="vLLM ended with status 1: ValueError: no such model"):
        start(made, with_vllm, backend="vllm")


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_an_unknown_reference_says_what_to_do(made: Path, tmp_path: Path) -> None:
    from gradeflow import tracking

    tracking.connect(settings(made).tracking.model_copy(update={"uri": f"sqlite:///{tmp_path}/m.db"}), tmp_path)
    with pytest.raises(SettingsError, match="the registry has no policy@champion"):
        find(made, tmp_path / "cache")


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_the_stage_serves_what_is_registered_until_it_is_told_to_stop(made: Path, tmp_path: Path) -> None:
    from gradeflow import registry, tracking

    shutil.copy(ROOT / "params.yaml", tmp_path)
    connection = settings(made).tracking.model_copy(update={"uri": f"sqlite:///{tmp_path}/m.db"})
    tracking.connect(connection, tmp_path)
    with tracking.start_run("train", {}) as run:
        digest = adapter.digest(made / "adapter")
        version = registry.register(made / "adapter", "policy", digest=digest, run_id=run.id, step=1, tags={})
    registry.set_alias(version, "champion")
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "gradeflow", "serve"),
            *("--serve.models", "[policy@champion]", "--serve.port", "0", "--serve.backend", "transformers"),
            *("--base.folder", str(made / "models"), "--tracking.uri", connection.uri),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            first, curl = process.stdout.readline(), process.stdout.readline()
            with openai.OpenAI(base_url=first.split(": ")[0], api_key="none", max_retries=0) as client:
                answer = ask(client)
            said = subprocess.run(curl, shell=True, capture_output=True, check=True).stdout
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert answer.choices[0].message.content == directly(made, "What is 3 + 4?", 16, adapted=True)
    assert answer.system_fingerprint == digest[:12]
    assert b"chat.completion" in said
    found = tracking.find_stage("serve")
    assert found
    assert tracking.read_tags(found)[registry.ADAPTER_DIGEST] == digest


LOADED = """
import json, mlflow
model = mlflow.pyfunc.load_model("models:/chat@champion")
print(json.dumps(model.predict({"messages": %s, "temperature": 0, "max_tokens": 8})))
"""


@pytest.fixture
def registered(
    made: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> tuple[Path, dict[str, str]]:
    """A project whose registry has the adapter, moved after that; and the environment of those who use plain MLflow."""
    before, project = tmp_path / "before", tmp_path / "project"
    before.mkdir()
    shutil.copy(ROOT / "params.yaml", before)
    (before / "models").symlink_to(made / "models")
    monkeypatch.chdir(before)
    tracking.connect(params.Tracking(uri=f"sqlite:///{before / 'mlflow.db'}", experiment="chat"), before)
    with tracking.start_run("train_grpo", {}) as run:
        pass
    digest = adapter.digest(made / "adapter")
    version = registry.register(made / "adapter", "chat", digest=digest, run_id=run.id, step=1, tags={})
    registry.set_alias(version, "champion")
    before.rename(project)
    monkeypatch.chdir(project)
    uri = f"sqlite:///{project / 'mlflow.db'}"
    tracking.connect(params.Tracking(uri=uri, experiment="chat"), project)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return project, kept | {"MLFLOW_TRACKING_URI": uri, "MLFLOW_DISABLE_TELEMETRY": "true"}


def ask_at_zero(server: Server) -> str:
    with openai.OpenAI(base_url=server.url, api_key="none") as client:
        reply = client.chat.completions.create(model=server.model, messages=QUESTION, temperature=0, max_tokens=8)
    return str(reply.choices[0].message.content)


def test_mlflow_loads_a_registered_adapter_and_it_answers_as_the_server_does(
    registered: tuple[Path, dict[str, str]], server: Server, made: Path
) -> None:
    project, environment = registered
    code = LOADED % json.dumps(QUESTION)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout.splitlines()[-1])
    assert reply["choices"][0]["message"]["content"] == ask_at_zero(server)
    assert reply["system_fingerprint"] == adapter.digest(made / "adapter")[:12]


def test_requests_to_the_python_function_are_checked_and_may_be_many(made: Path, server: Server) -> None:
    from gradeflow.server import chat, pyfunc

    loaded = chat.load(str(made / "models" / BASE), "")
    loaded.attach("d", made / "adapter")
    model = pyfunc.ChatModel(loaded, "d", 8)
    row = {"messages": QUESTION, "temperature": 0}
    assert [reply["choices"][0]["message"]["content"] for reply in model.predict([row, row])] == [
        ask_at_zero(server)
    ] * 2
    assert model.predict(row, {"max_tokens": 1})["usage"]["completion_tokens"] == 1
    for wrong in ({"messages": []}, {"messages": QUESTION, "max_tokens": 9}, {"messages": QUESTION, "stream": True}):
        with pytest.raises(ValueError, match=r"messages|max_tokens|stream"):
            model.predict(wrong)


@pytest.mark.slow
def test_mlflow_serves_a_registered_adapter(registered: tuple[Path, dict[str, str]], server: Server) -> None:
    project, environment = registered
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["models", "serve", "-m", "models:/chat@champion", "--env-manager", "local", "-p", str(port), "-w", "1"]
    program = Path(sys.executable).with_name("mlflow")
    active = environment | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    with (project / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *command], cwd=project, env=active, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, (project / "serve.log").read_text()
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/ping", trust_env=False).is_success:
                    break
            time.sleep(0.5)
        asked = {"messages": QUESTION, "temperature": 0, "max_tokens": 8}
        reply = httpx.post(f"http://127.0.0.1:{port}/invocations", json=asked, trust_env=False, timeout=60)
        assert reply.is_success, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == ask_at_zero(server)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
