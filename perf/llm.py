"""Calls to a slow server that takes only so many at once: our client beside the official one behind a semaphore.

    python perf/llm.py

The server is a stand-in in a process of its own: so long a call, 429 beyond its limit. The ideal is calls / limit x
latency. Before the clock starts each client has made one call.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from gradeflow import params
from gradeflow.llm.openai import OpenAIClient
from gradeflow.prompt import user


class Server:
    """An OpenAI-compatible server that takes `most` calls at once, and after `falls[0]` of them only `falls[1]`."""

    def __init__(self, latency_s: float, most: int, falls: tuple[int, int] | None) -> None:
        self.latency_s = latency_s
        self.most = most
        self.falls = falls
        self.now = self.served = self.refused = 0

    async def run(self, parent: Connection) -> None:
        """Tell `parent` the port, and once it asks, how many calls were refused."""
        listening = await asyncio.start_server(self.answer, "127.0.0.1", 0, backlog=1024)
        parent.send(listening.sockets[0].getsockname()[1])
        await asyncio.to_thread(parent.recv)
        parent.send(self.refused)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (line := await reader.readline()).strip():
                size = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    size = int(value) if name.lower() == "content-length" else size
                await reader.readexactly(size)
                status, body = await self.reply() if line.startswith(b"POST") else (404, {})
                content = json.dumps(body).encode()
                head = (
                    f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
                )
                writer.write(head.encode() + content)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client is gone, or this program ends
        finally:
            writer.close()

    async def reply(self) -> tuple[int, dict[str, object]]:
        if self.now >= self.most:
            self.refused += 1
            return 429, {"error": {"message": "busy"}}
        self.now += 1
        try:
            await asyncio.sleep(self.latency_s)
        finally:
            self.now -= 1
        self.served += 1
        if self.falls and self.served == self.falls[0]:
            self.most = self.falls[1]
        message = {"role": "assistant", "content": "True"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        made = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return 200, made | {"choices": [choice], "usage": usage}


def serve(parent: Connection, *server: Any) -> None:
    asyncio.run(Server(*server).run(parent))


async def timed(calls: int, ask: Callable[[str, int], Awaitable[object]], *server: Any) -> tuple[float, int, int]:
    """Seconds for all calls, how many failed, and how many the server refused."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=[there, *server], daemon=True)
    process.start()
    url = f"http://127.0.0.1:{here.recv()}/v1"
    await ask(url, -1)
    began = time.perf_counter()
    found = await asyncio.gather(*(ask(url, number) for number in range(calls)), return_exceptions=True)
    seconds = time.perf_counter() - began
    here.send("how many were refused?")
    refused = here.recv()
    process.kill()
    return seconds, sum(isinstance(one, Exception) for one in found), refused


def ours(most: int) -> Callable[[str, int], Awaitable[object]]:
    clients: dict[str, OpenAIClient] = {}

    async def ask(url: str, number: int) -> object:
        settings = params.Model(url=url, model="m", concurrency=most, cache="", no_proxy=True)
        client = clients.setdefault(url, clients.get(url) or OpenAIClient(settings))
        return await client.chat(user(str(number)))

    return ask


def official(most: int) -> Callable[[str, int], Awaitable[object]]:
    """What a user would write: the official client with its own retries, behind a semaphore."""
    import openai

    slots = asyncio.Semaphore(most)
    clients: dict[str, openai.AsyncOpenAI] = {}

    async def ask(url: str, number: int) -> object:
        if url not in clients:
            http = openai.DefaultAsyncHttpxClient(trust_env=False)
            clients[url] = openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=3, http_client=http)
        async with slots:
            return await clients[url].chat.completions.create(
                model="m", messages=[{"role": "user", "content": str(number)}], temperature=0, max_tokens=64
            )

    return ask


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--latency", type=float, default=0.5, help="seconds a call")
    parser.add_argument("--limit", type=int, default=64, help="calls that the server takes at once")
    given = parser.parse_args()
    ideal = given.calls / given.limit * given.latency
    print(f"{given.calls} calls of {given.latency:g} s, {given.limit} at once: ideal {ideal:.1f} s\n")
    print(f"{'':52}{'seconds':>9}{'of ideal':>10}{'failed':>8}{'refused':>9}")
    for name, ask, falls in (
        ("the official client, limit known", official(given.limit), None),
        ("the official client, 256 at once", official(256), None),
        ("ours, limit known", ours(given.limit), None),
        ("ours, up to 256", ours(256), None),
        ("the official client, limit falls to 8 midway", official(given.limit), (given.calls // 2, 8)),
        ("ours, limit falls to 8 midway", ours(256), (given.calls // 2, 8)),
    ):
        best = given.latency * given.calls / 2 * (1 / given.limit + 1 / 8) if falls else ideal
        seconds, failed, refused = await timed(given.calls, ask, given.latency, given.limit, falls)
        print(f"{name:52}{seconds:9.1f}{seconds / best:10.2f}{failed:8}{refused:9}")


if __name__ == "__main__":
    asyncio.run(main())
