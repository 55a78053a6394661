"""Requests that nobody would write, made from the server's own OpenAPI schema."""

from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gradeflow import serve
from support import serving
from support.serving import REQUESTS, find, fuzz, register, settings

LEAK = 150 * 2**20
"""Bytes that a process may grow by; 5,000 requests that each leave 100 KiB would take three times as much."""


def test_no_request_makes_the_server_fail_or_grow(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, store: Path
) -> None:
    made = serving.make(tmp_path_factory.mktemp("made"))
    serving.connect(store)
    register(made / "adapter", "fuzzed", "champion")
    told: dict[str, Any] = {"models": ["fuzzed"], "max_tokens": 8}
    with serve.serving(find(made, **told), settings(made, **told)) as server:
        asked = {"model": "fuzzed", "messages": serving.QUESTION, "temperature": 0, "max_tokens": 8}
        before = httpx.post(f"{server.url}/chat/completions", json=asked).json()["choices"]
        held = psutil.Process().memory_info().rss
        assert fuzz(server, tmp_path, "fuzzed") >= REQUESTS
        assert httpx.post(f"{server.url}/chat/completions", json=asked).json()["choices"] == before
        assert psutil.Process().memory_info().rss - held < LEAK
        assert "gradeflow_running_requests 0.0" in httpx.get(server.url.removesuffix("/v1") + "/metrics").text
