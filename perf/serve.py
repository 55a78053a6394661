"""The gateway before vLLM beside plain `vllm serve`, switches of an alias under load, and 16 adapters on one base.

    make vllm; python perf/serve.py [flips|throughput|many] [--rounds N]

Run in a project whose registry has `gradeflow-policy@champion` (`make demo`). Servers are real, on loopback; requests
are completions of 32 tokens with a prompt of their own, greedy. Throughput is measured in interleaved pairs, plain and
ours alternating, and told as the median of their ratios with a bootstrapped 95 % interval. Other adapters are made from
the champion's files by scaling them a little, and are registered in a store of their own below a temporary folder.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
from safetensors.numpy import load_file, save_file

from gradeflow import adapter, params, registry, serve, tracking
from gradeflow.adapter import vllm
from gradeflow.llm import vllm_process
from gradeflow.registry import Version
from gradeflow.server import catalogue

TOKENS = 32
COUNTS = {1: 40, 8: 240, 32: 480}
"""Requests of one measurement, by how many are asked at once."""
NAME = "perf"
ROOT = Path.cwd()


@dataclass(frozen=True)
class Told:
    """What came of requests: `late` are the seconds each took."""

    seconds: float
    by_digest: Counter[str]
    failed: list[str]

    @property
    def rate(self) -> float:
        return sum(self.by_digest.values()) / self.seconds


async def load(url: str, model: str, count: int, concurrency: int, *, until: asyncio.Event | None = None) -> Told:
    """So many requests, and more while `until` is not set; so many at once."""
    by_digest: Counter[str] = Counter()
    failed: list[str] = []
    numbers = iter(range(10**9 if until else count))
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            if until and until.is_set() and sum(by_digest.values()) >= count:
                return
            asked = {
                "model": model,
                "prompt": f"{number}: What is {number} + 4?",
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            try:
                reply = await client.post("/completions", json=asked)
                told = reply.json()
                digest = reply.headers.get("x-gradeflow-adapter", "")
                if not reply.is_success or (digest and told["system_fingerprint"] != digest[:12]):
                    failed.append(f"{reply.status_code} {reply.text[:200]}")
                by_digest[digest] += 1
            except (httpx.HTTPError, ValueError, KeyError) as error:
                failed.append(repr(error))

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120, trust_env=False) as client:
        began = time.monotonic()
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
    return Told(time.monotonic() - began, by_digest, failed)


def adapters(settings: params.Params, scratch: Path, count: int) -> list[Version]:
    """Registered versions of `perf`: the project's champion, and others a little off it."""
    tracking.connect(settings.tracking, ROOT)
    champion = registry.resolve("gradeflow-policy@champion")
    assert champion is not None, "no gradeflow-policy@champion here: run `make demo` first"
    folder = registry.fetch(champion, ROOT / ".gradeflow/adapters")
    store = settings.tracking.model_copy(update={"uri": f"sqlite:///{scratch / 'mlflow.db'}"})
    tracking.connect(store, scratch)
    found = []
    for number in range(count):
        own = scratch / f"adapter-{number}"
        shutil.copytree(folder, own, ignore=shutil.ignore_patterns("MLmodel", "requirements.txt"))
        file = own / "adapter_model.safetensors"
        scale = np.float32(1 + number / 20)
        save_file({key: value * (scale if "lora_B" in key else 1) for key, value in load_file(file).items()}, file)
        with tracking.start_run("train_grpo", {}) as run:
            digest = adapter.digest(own)
            found.append(registry.register(own, NAME, digest=digest, run_id=run.id, step=number, tags={}))
    registry.set_alias(found[0], "champion")
    return found


def settings_of(models: Sequence[str], scratch: Path) -> params.Params:
    loaded = params.load(ROOT / "params.yaml")
    told = {"models": list(models), "backend": "vllm", "port": 0, "max_tokens": 512}
    return loaded.model_copy(
        update={
            "serve": loaded.serve.model_copy(update=told),
            "tracking": loaded.tracking.model_copy(update={"uri": f"sqlite:///{scratch / 'mlflow.db'}"}),
            "base": loaded.base.model_copy(update={"folder": (ROOT / loaded.base.folder).absolute()}),
        }
    )


@contextlib.contextmanager
def ours(models: Sequence[str], scratch: Path) -> Iterator[str]:
    settings = settings_of(models, scratch)
    with contextlib.chdir(scratch), serve.serving(serve.find(settings, "vllm"), settings, ROOT) as server:
        yield server.url


@contextlib.contextmanager
def plain(version: Version, scratch: Path) -> Iterator[str]:
    """`vllm serve` with the adapter's files, and nothing of ours."""
    settings = settings_of([NAME], scratch)
    served = catalogue.fetch(version, settings.base, scratch / "cache", "vllm")
    base, _ = catalogue.base_of(served.folder, settings.base)
    port = free_port()
    program = vllm.program(ROOT).absolute()
    command = [
        *(str(program), "serve", base, "--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)),
        *("--enable-lora", "--max-lora-rank", str(adapter.max_lora_rank(served.rank)), "--max-loras", "2"),
        *("--lora-modules", f"{NAME}={served.folder}"),
        *(("--dtype", "float32", "--enforce-eager") if vllm.is_cpu_build(program) else ()),
    ]
    given = vllm_process.environment("", os.environ) | {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
    url = f"http://127.0.0.1:{port}"
    with vllm_process.running(command, given, url, scratch / "plain.log"):
        yield f"{url}/v1"


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.contextmanager
def paused(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """A server that has nothing to do still spins and polls, on the cores of the one that is measured."""
    for one in processes:
        one.suspend()
    yield
    for one in processes:
        one.resume()


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def resident() -> float:
    """GiB of this process's children: a server and its workers."""
    held = 0
    for child in children():
        with contextlib.suppress(psutil.Error):
            held += child.memory_full_info().pss
    return held / 2**30


def throughput(scratch: Path, rounds: int, only: Sequence[int] | None) -> None:
    version = adapters(params.load(ROOT / "params.yaml"), scratch, 1)[0]
    with plain(version, scratch) as theirs:
        others = {"ours": children()}
        with ours([f"{NAME}@champion"], scratch) as mine:
            others["plain"] = [one for one in children() if one not in others["ours"]]
            compare({"plain": theirs, "ours": mine}, others, rounds, only)


def compare(
    urls: dict[str, str], others: dict[str, list[psutil.Process]], rounds: int, only: Sequence[int] | None
) -> None:
    """`others` are the processes that stand still while one is measured."""

    def measure(whose: str, count: int, concurrency: int) -> float:
        with paused(others[whose]):
            told = asyncio.run(load(urls[whose], NAME, count, concurrency))
        assert not told.failed, f"{whose}, {concurrency} at once: {len(told.failed)} failed, first {told.failed[0]}"
        return told.rate

    for concurrency, count in COUNTS.items():
        if only and concurrency not in only:
            continue
        for whose in urls:
            measure(whose, count // 2, concurrency)
        rates = []
        for turn in range(rounds):
            order = sorted(urls, reverse=bool(turn % 2))
            rate = {whose: measure(whose, count, concurrency) for whose in order}
            rates.append((rate["plain"], rate["ours"]))
        ratios = [second / first for first, second in rates]
        drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
        low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
        first, second = np.median(rates, axis=0)
        print(
            f"concurrency {concurrency:2}: plain {first:.1f}, ours {second:.1f} requests/s; median ratio of "
            f"{rounds} pairs {np.median(ratios):.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )


async def flipped(url: str, versions: Sequence[Version], flips: int, least: int) -> tuple[Told, list[float]]:
    """Load while the alias moves; of each move, the seconds to the first reply of the new version."""
    over = asyncio.Event()
    task = asyncio.create_task(load(url, NAME, least, 16, until=over))
    late: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        await asyncio.sleep(1)
        for turn in range(1, flips + 1):
            to = versions[turn % 2]
            await asyncio.to_thread(registry.set_alias, to, "champion")
            moved = time.monotonic()
            asked = {"model": NAME, "prompt": "What?", "max_tokens": 1, "temperature": 0, "stream": True}
            while True:
                async with client.stream("POST", "/completions", json=asked) as reply:
                    if reply.headers["x-gradeflow-adapter"] == to.digest:
                        await anext(reply.aiter_lines())
                        break
            late.append(time.monotonic() - moved)
            await asyncio.sleep(0.5)
    over.set()
    return await task, late


def flips(scratch: Path, count: int) -> None:
    versions = adapters(params.load(ROOT / "params.yaml"), scratch, 2)
    with ours([f"{NAME}@champion"], scratch) as url:
        told, late = asyncio.run(flipped(url, versions, count, 2000))
    answered = ", ".join(f"{digest[:12]} {number}" for digest, number in told.by_digest.items())
    print(f"{count} moves of the alias under load: {len(told.failed)} failed; answered by {answered}")
    print(f"from the move to the new version's first token: median {np.median(late):.2f} s, longest {max(late):.2f} s")
    print(", ".join(f"{one:.2f}" for one in late))
    for one in told.failed[:3]:
        print(one)


def many(scratch: Path, rounds: int) -> None:
    versions = adapters(params.load(ROOT / "params.yaml"), scratch, 16)
    told = {}
    for count in (1, 16):
        names = [f"{NAME}/{one.version}" for one in versions[:count]]
        with ours(names, scratch) as url:
            asyncio.run(spread(url, names, 64))
            rates = [asyncio.run(spread(url, names, 320)) for _ in range(rounds)]
            told[count] = float(np.median(rates)), resident()
        print(
            f"{count:2} adapters: {told[count][0]:.1f} requests/s at 16 at once, {told[count][1]:.2f} GiB", flush=True
        )
    print(f"16 servers with one adapter each would take 16 x {told[1][1]:.2f} = {16 * told[1][1]:.1f} GiB (computed)")


async def spread(url: str, names: Sequence[str], count: int) -> float:
    each = max(16 // len(names), 1)
    began = time.monotonic()
    found = await asyncio.gather(*(load(url, name, count // len(names), each) for name in names))
    assert not any(one.failed for one in found), [one.failed[:1] for one in found]
    return sum(sum(one.by_digest.values()) for one in found) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=["flips", "throughput", "many"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--concurrency", type=int, nargs="*", choices=list(COUNTS), help="of throughput; default: all")
    given = parser.parse_args()
    for what in given.what or ["flips", "throughput", "many"]:
        with tempfile.TemporaryDirectory() as place:
            match what:
                case "flips":
                    flips(Path(place), 20)
                case "throughput":
                    throughput(Path(place), given.rounds, given.concurrency)
                case "many":
                    many(Path(place), given.rounds)


if __name__ == "__main__":
    main()
