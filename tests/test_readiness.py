import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params, readiness
from gradeflow.errors import ProviderError, SetupError
from gradeflow.params import Model
from support.chat_server import ChatServer, Fault

SETTINGS = params.load(Path(__file__).parents[1] / "params.yaml")


def model(url: str, **changes: Any) -> Model:
    return SETTINGS.models["base"].model_copy(update={"url": url, "model": "m", "retries": 0, **changes})


def check(models: Mapping[str, Model], **sandbox: Any) -> None:
    asyncio.run(readiness.check(SETTINGS.sandbox.model_copy(update=sandbox), models))


def test_each_model_is_asked_once_and_one_in_this_process_is_not() -> None:
    with ChatServer() as server:
        check({"executor": model(server.url), "judge": model("local")})
        assert len(server.bodies) == 1


def test_a_model_that_is_not_there_is_named_with_its_name_and_what_to_do() -> None:
    with pytest.raises(ProviderError, match=r"^judge: m at http://127\.0\.0\.1:9/v1: unreachable .* check the url"):
        check({"judge": model("http://127.0.0.1:9/v1")})


@pytest.mark.parametrize(("fault", "said"), [("401", "check the key"), ("404", "check model"), ("html", "server")])
def test_a_model_that_refuses_is_named(fault: Fault, said: str) -> None:
    with (
        ChatServer(faults=[fault]) as server,
        pytest.raises(ProviderError, match=f"^executor: m at {server.url}.*{said}"),
    ):
        check({"executor": model(server.url)})


@pytest.mark.parametrize("fault", ["cut", "reasoning"])
def test_an_answer_without_use_is_an_answer(fault: Fault) -> None:
    with ChatServer(faults=[fault]) as server:
        check({"executor": model(server.url)})


def test_a_model_that_keeps_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PATIENCE_S", 0.2)
    with (
        ChatServer(latency_s=5) as server,
        pytest.raises(ProviderError, match=f"^executor: {server.url} has not answered"),
    ):
        check({"executor": model(server.url)})


def test_a_machine_that_cannot_isolate_is_told_in_one_line_before_anyone_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As bubblewrap speaks where Ubuntu's AppArmor keeps user namespaces from it."""
    program = tmp_path / "_bin" / "bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("gradeflow.sandbox.bubblewrap.binary", lambda: program)
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "apparmor_restrict_unprivileged_userns").write_text("1")
    monkeypatch.setattr("gradeflow.sandbox.bubblewrap.SYSCTL", tmp_path)
    with pytest.raises(SetupError) as caught:
        check({"executor": model("http://127.0.0.1:9/v1")}, isolation="bubblewrap")
    said = str(caught.value)
    assert "bwrap: setting up uid map: Permission denied. Ubuntu's AppArmor" in said
    assert os.path.realpath(program) in said
    assert "\n" not in said
