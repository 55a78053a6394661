"""Serve a registered adapter behind OpenAI's API: by vLLM where its environment is, else in this process.

Not here: following an alias that moves, several adapters on one base, the adapter's digest in vLLM's replies.
"""

import contextlib
import ipaddress
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gradeflow import adapter, models, registry, tracking
from gradeflow.adapter import vllm
from gradeflow.errors import AdapterError, SettingsError, SetupError
from gradeflow.llm import vllm_process
from gradeflow.params import Base, Params, Serve
from gradeflow.redact import redact
from gradeflow.registry import Version

CACHE = Path(".gradeflow/adapters")
VLLM_LOG = Path(".gradeflow/vllm.log")
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """A checked adapter, its base (a folder, or a hub id at `revision`), and the names it answers to."""

    names: tuple[str, ...]
    adapter: Path
    digest: str
    rank: int
    base: str
    base_name: str
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. `url` ends in /v1."""

    url: str
    model: str
    digest: str
    backend: str
    alive: Callable[[], bool]


def main(params: Params) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tracking.connect(params.tracking, Path.cwd())
    served = find(params)
    with tracking.start_run("serve", redact(params.model_dump(mode="json"))) as run:
        began = time.monotonic()
        with serving(served, params.serve) as server:
            run.set_tags({registry.ADAPTER_DIGEST: served.digest, "gradeflow.serve.backend": server.backend})
            run.log_metrics({"serve/start_seconds": time.monotonic() - began})
            print(f"{server.url}: {', '.join(served.names)}, adapter {served.digest[:12]} by {server.backend}")
            print(example(server, params.serve), flush=True)
            _wait(server)


def find(params: Params, cache: Path = CACHE) -> Served:
    """The adapter that `serve.model` names in the registry: fetched, and checked against what was registered.

    Raises:
        SettingsError: there is no such version.
        AdapterError: its files are not the registered adapter, do nothing, or do not fit the base.
    """
    version = registry.resolve(params.serve.model)
    if version is None:
        raise SettingsError(
            f"serve.model: the registry has no {params.serve.model}. Run `gradeflow promote`, or name another"
        )
    return check(registry.fetch(version, cache), version, names(params.serve.model, version), params.base)


def names(reference: str, version: Version) -> tuple[str, ...]:
    """What clients may call the model: as it was asked for, the bare name, and the fixed version."""
    asked = reference.removeprefix("models:/")
    return tuple(dict.fromkeys((asked, version.name, f"{version.name}/{version.version}")))


def check(folder: Path, version: Version, served_as: tuple[str, ...], settings: Base) -> Served:
    config = adapter.read_config(folder)
    named, revision = str(config.get("base_model_name_or_path")), config.get("revision") or ""
    base, revision = models.of_adapter(settings, named, revision)
    facts = adapter.validate(folder, base_folder=Path(base) if Path(base).is_dir() else None)
    if facts.digest != version.digest:
        raise AdapterError(
            f"{folder}: its digest is {facts.digest[:12]}; {version.name} {version.version} was registered "
            f"as {version.digest[:12]}"
        )
    return Served(
        served_as,
        folder.resolve(),
        facts.digest,
        facts.rank,
        base,
        str(config["base_model_name_or_path"]),
        revision,
    )


def example(server: Server, settings: Serve) -> str:
    """A curl command that asks the served model something."""
    key = f' -H "Authorization: Bearer ${settings.api_key_env}"' if settings.api_key_env else ""
    body = f'{{"model": "{server.model}", "messages": [{{"role": "user", "content": "What is 3 + 4?"}}]}}'
    return f"curl {server.url}/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


@contextlib.contextmanager
def serving(served: Served, settings: Serve, root: Path = Path()) -> Iterator[Server]:
    """A server that answers as long as the context lasts; port 0 takes a free one.

    Raises:
        SettingsError: the address is taken, or would be open to others without a key.
        SetupError: vLLM is asked for and is not there, or does not start.
        AdapterError: the running model is not changed by the adapter.
    """
    key = _key(settings)
    program = vllm.program(root)
    if settings.backend == "vllm" and not program.is_file():
        raise SetupError(
            f"serve.backend: {program} is not there. Run `make vllm`, or set serve.backend to transformers"
        )
    by_vllm = settings.backend != "transformers" and program.is_file()
    with _by_vllm(served, settings, key, root) if by_vllm else _in_process(served, settings, key) as server:
        yield server


def _key(settings: Serve) -> str:
    key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
    if settings.api_key_env and not key:
        raise SettingsError(f"serve.api_key_env: the environment has no {settings.api_key_env}. Export it with the key")
    if not key and not _is_loopback(settings.host):
        raise SettingsError(
            f"serve.host: others can reach {settings.host}, so clients must send a key. Name the variable "
            "that holds it in serve.api_key_env, or serve on 127.0.0.1"
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise SettingsError(
            f"serve.port: cannot listen on {host}:{port}: {error.strerror or error}. Port 0 takes a free one"
        ) from None


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{reachable}:{port}"


@contextlib.contextmanager
def _in_process(served: Served, settings: Serve, key: str) -> Iterator[Server]:
    import uvicorn

    from gradeflow.server import chat, http

    listener = _listen(settings.host, settings.port)
    with contextlib.closing(listener):
        loaded = chat.load(served.base, served.revision, served.adapter)
        card = http.Card(served.names, served.digest, served.base_name)
        api = http.app(loaded, card, max_tokens=settings.max_tokens, key=key)
        engine = uvicorn.Server(
            uvicorn.Config(api, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=int(STOP_S))
        )
        thread = threading.Thread(target=engine.run, kwargs={"sockets": [listener]}, daemon=True)
        url = _url(settings.host, listener.getsockname()[1])
        thread.start()
        try:
            while not engine.started and thread.is_alive():
                time.sleep(0.01)
            if not engine.started:
                raise SetupError(f"the server at {url} did not start; what went wrong is above")
            yield Server(f"{url}/v1", served.names[0], served.digest, "transformers", thread.is_alive)
        finally:
            engine.should_exit = True
            thread.join(STOP_S)


def vllm_command(program: Path, served: Served, host: str, port: int, *, cpu: bool) -> list[str]:
    rank = adapter.max_lora_rank(served.rank)
    pinned = ["--revision", served.revision, "--tokenizer-revision", served.revision] if served.revision else []
    return [
        *(str(program), "serve", served.base, *pinned, "--served-model-name", served.base_name),
        *("--host", host, "--port", str(port)),
        *("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(len(served.names))),
        *("--lora-modules", *(f"{name}={served.adapter}" for name in served.names)),
        *(("--dtype", "float32", "--enforce-eager") if cpu else ()),
    ]


@contextlib.contextmanager
def _by_vllm(served: Served, settings: Serve, key: str, root: Path) -> Iterator[Server]:
    adapter.validate(served.adapter, backend="vllm", allow_bin=True)
    with _listen(settings.host, settings.port) as probe:
        port = probe.getsockname()[1]
    program, url = vllm.program(root).absolute(), _url(settings.host, port)
    command = vllm_command(program, served, settings.host, port, cpu=vllm.is_cpu_build(program))
    given = vllm_process.environment(key, os.environ)
    with vllm_process.running(command, given, url, root / VLLM_LOG) as process:
        _prove_alive(url, served, key)
        yield Server(f"{url}/v1", served.names[0], served.digest, "vllm", lambda: process.poll() is None)


def _prove_alive(url: str, served: Served, key: str) -> None:
    """Ask base and adapter for the same token: an adapter at work leaves other log-probabilities."""
    import httpx

    found = []
    for model in (served.base_name, served.names[0]):
        question = {
            "model": model,
            "prompt": list(range(1, 17)),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 5,
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        reply = httpx.post(f"{url}/v1/completions", json=question, headers=headers, trust_env=False, timeout=120)
        if not reply.is_success:
            raise SetupError(f"vLLM at {url} does not serve {model}: {reply.status_code} {reply.text[:200]}")
        found.append(reply.json()["choices"][0]["logprobs"]["top_logprobs"])
    if found[0] == found[1]:
        raise AdapterError(f"{served.adapter}: served by vLLM the adapter changes nothing")


def _wait(server: Server) -> None:
    try:
        while server.alive():
            time.sleep(0.2)
    except KeyboardInterrupt:
        print("stopping: requests in flight are finished first", flush=True)
        return
    raise SetupError(f"the server at {server.url} ended by itself; its log says why")
