"""Serve registered adapters of one base behind OpenAI's API: by vLLM where its environment is, else in this process."""

import contextlib
import ipaddress
import json
import os
import shlex
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow import adapter, registry, tracking
from gradeflow.adapter import vllm
from gradeflow.errors import AdapterError, SettingsError, SetupError
from gradeflow.llm import vllm_process
from gradeflow.params import Params, Serve
from gradeflow.redact import redact
from gradeflow.server import catalogue, running
from gradeflow.server.catalogue import Reference, Served

VLLM_LOG = Path(".gradeflow/vllm.log")
STOP_S = 30.0
DRAIN_S = 25
"""Seconds for requests in flight, before those that a server has to end."""
LOOK_S = 0.1
STORE_S = 60.0
"""How long a new server may find no registry."""
MIDDLEWARE = "gradeflow.server.vllm.Middleware"


@dataclass(frozen=True, slots=True)
class Found:
    """What is served at first, by its reference, and the base of all (a folder, or a hub id at `revision`)."""

    first: Mapping[Reference, Served]
    base: str
    revision: str
    largest: int
    """The largest rank of all registered versions of these models."""

    @property
    def model(self) -> str:
        return str(next(iter(self.first)))


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. `url` ends in /v1."""

    url: str
    model: str
    backend: str
    alive: Callable[[], bool]


def main(params: Params) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tracking.connect(params.tracking, Path.cwd())
    found = find(params, "vllm" if uses_vllm(params.serve) else "hf")
    with tracking.start_run("serve", redact(params.model_dump(mode="json"))) as run:
        began = time.monotonic()
        with serving(found, params, run_id=run.id) as server:
            digests = ",".join(dict.fromkeys(one.version.digest for one in found.first.values()))
            run.set_tags({registry.ADAPTER_DIGEST: digests, "gradeflow.serve.backend": server.backend})
            run.log_metrics({"serve/start_seconds": time.monotonic() - began})
            for reference, served in found.first.items():
                print(f"{server.url}: {', '.join(reference.names)}: {served.version} by {server.backend}")
            print(example(server, params.serve), flush=True)
            _wait(server)


def find(params: Params, backend: adapter.Backend = "hf", cache: Path = running.CACHE) -> Found:
    """What the names of `serve.models` lead to in the registry: fetched, and checked against what was registered.

    Raises:
        SettingsError: there is no such version, or they have different bases.
        AdapterError: the files are not the registered adapter, do nothing, or do not fit the base.
    """
    first: dict[Reference, Served] = {}
    for reference in running.references(params):
        version = registry.resolve(str(reference))
        if version is None:
            raise SettingsError(
                f"serve.models: the registry has no {reference}. Run `gradeflow promote`, or name another"
            )
        first[reference] = catalogue.fetch(version, params.base, cache, backend)
    bases = {catalogue.base_of(served.folder, params.base): str(one) for one, served in first.items()}
    if len(bases) > 1:
        told = "; ".join(f"{one} is of {base}" for (base, _), one in bases.items())
        raise SettingsError(f"serve.models: a server has one base, and {told}. Serve them apart")
    ((base, revision),) = bases
    return Found(first, base, revision, _largest_rank(first))


def _largest_rank(first: Mapping[Reference, Served]) -> int:
    """Of what is served now, and of all versions of these models that vLLM could take one day."""
    told = [one.tags.get(registry.RANK, "") for name in {one.name for one in first} for one in registry.versions(name)]
    later = [int(rank) for rank in told if rank.isdecimal() and int(rank) <= vllm.RANKS[-1]]
    return max([*later, *(served.rank for served in first.values())])


def uses_vllm(settings: Serve, root: Path = Path()) -> bool:
    """Whether vLLM serves, by what is asked for and what is there.

    Raises:
        SetupError: vLLM is asked for and is not there.
    """
    program = vllm.program(root)
    if settings.backend == "vllm" and not program.is_file():
        raise SetupError(
            f"serve.backend: {program} is not there. Run `make vllm`, or set serve.backend to transformers"
        )
    return settings.backend != "transformers" and program.is_file()


def example(server: Server, settings: Serve) -> str:
    """A curl command that asks the served model something."""
    key = f' -H "Authorization: Bearer ${settings.api_key_env}"' if settings.api_key_env else ""
    body = f'{{"model": "{server.model}", "messages": [{{"role": "user", "content": "What is 3 + 4?"}}]}}'
    return f"curl {server.url}/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


@contextlib.contextmanager
def serving(found: Found, params: Params, root: Path = Path(), *, run_id: str = "") -> Iterator[Server]:
    """A server that answers as long as the context lasts; port 0 takes a free one.

    Raises:
        SettingsError: the address is taken, or would be open to others without a key.
        SetupError: vLLM is asked for and is not there, or does not start.
        AdapterError: an adapter changes nothing once it is loaded, or does not do what it was registered for.
    """
    key = _key(params.serve)
    by_vllm = uses_vllm(params.serve, root)
    with _by_vllm(found, params, key, run_id, root) if by_vllm else _in_process(found, params, key, run_id) as server:
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
def _in_process(found: Found, params: Params, key: str, run_id: str) -> Iterator[Server]:
    import uvicorn

    from gradeflow.server import chat, http
    from gradeflow.server.local import Local

    settings = params.serve
    listener = _listen(settings.host, settings.port)
    with contextlib.closing(listener):
        loaded = chat.load(found.base, found.revision)
        api = http.app(loaded, max_tokens=settings.max_tokens)
        gateway = running.gateway(
            api, Local(loaded, (found.base, found.revision)), params, backend="hf", key=key, run_id=run_id
        )
        engine = uvicorn.Server(
            uvicorn.Config(
                gateway, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=int(STOP_S)
            )
        )
        thread = threading.Thread(target=engine.run, kwargs={"sockets": [listener]}, daemon=True)
        url = _url(settings.host, listener.getsockname()[1])
        thread.start()
        try:
            _await_ready(url, key, thread.is_alive)
            yield Server(f"{url}/v1", found.model, "transformers", thread.is_alive)
        finally:
            engine.should_exit = True
            thread.join(STOP_S)


def vllm_command(program: Path, found: Found, settings: Serve, port: int, *, cpu: bool) -> list[str]:
    pinned = ["--revision", found.revision, "--tokenizer-revision", found.revision] if found.revision else []
    together = len(found.first) + 1  # while an alias moves, its old version still answers
    return [
        *(str(program), "serve", found.base, *pinned, "--served-model-name", "base"),
        *("--host", settings.host, "--port", str(port)),
        *("--enable-lora", "--max-lora-rank", str(adapter.max_lora_rank(found.largest))),
        *("--max-loras", str(together)),
        *("--shutdown-timeout", str(DRAIN_S), "--middleware", MIDDLEWARE),
        *(("--dtype", "float32", "--enforce-eager") if cpu else ()),
        *settings.vllm_args,
    ]


@contextlib.contextmanager
def _by_vllm(found: Found, params: Params, key: str, run_id: str, root: Path) -> Iterator[Server]:
    settings = params.serve
    with _listen(settings.host, settings.port) as probe:
        port = probe.getsockname()[1]
    program, url = vllm.program(root).absolute(), _url(settings.host, port)
    command = vllm_command(program, found, settings, port, cpu=vllm.is_cpu_build(program))
    with tempfile.TemporaryDirectory() as place:
        given = vllm_process.environment("", os.environ) | {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            running.SETTINGS: str(_written(params, Path(place))),
            running.KEY: key,
            running.RUN: run_id,
        }
        with vllm_process.running(command, given, url, root / VLLM_LOG) as process:
            _await_ready(url, key, lambda: process.poll() is None)
            yield Server(f"{url}/v1", found.model, "vllm", lambda: process.poll() is None)


def _written(params: Params, place: Path) -> Path:
    """These settings as a file."""
    file = place / "params.yaml"
    file.write_text(json.dumps(params.model_dump(mode="json")), encoding="utf-8")  # which is YAML, too
    return file


def _await_ready(url: str, key: str, alive: Callable[[], bool]) -> None:
    """Wait until every name leads to an adapter that is loaded and proved.

    Raises:
        SetupError: the server ends before, or finds no registry.
        AdapterError: an adapter is refused.
    """
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    deadline = time.monotonic() + STORE_S
    while alive():
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.get(f"{url}/ready", headers=headers, trust_env=False, timeout=5)
            told: dict[str, Any] = reply.json()
            if told["ready"]:
                return
            if refused := told.get("refused"):
                raise AdapterError("; ".join(f"{name}: {why}" for name, why in refused.items()))
            if told.get("registry", "answers") != "answers" and time.monotonic() > deadline:
                raise SetupError(f"the server at {url} does not reach the registry: {told['registry']}")
        time.sleep(LOOK_S)
    raise SetupError(f"the server at {url} did not start; what went wrong is above")


def _wait(server: Server) -> None:
    try:
        while server.alive():
            time.sleep(0.2)
    except KeyboardInterrupt:
        print("stopping: requests in flight are finished first", flush=True)
        return
    raise SetupError(f"the server at {server.url} ended by itself; its log says why")
