import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from gradeflow.errors import DataError, ProviderError
from gradeflow.llm import ScriptedClient
from gradeflow.prompt import user


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


def test_importing_the_module_is_quick() -> None:
    heavy = "{'torch', 'transformers', 'openai'}"
    code = f"import sys, gradeflow.llm; sys.exit(len({heavy} & set(sys.modules)))"
    started = time.perf_counter()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert time.perf_counter() - started < 10
