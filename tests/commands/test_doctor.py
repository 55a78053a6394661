import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gradeflow import __main__ as cli
from gradeflow import params, sandbox, tracking
from gradeflow.commands import doctor
from gradeflow.errors import SetupError, TrackingError
from gradeflow.sandbox import Probe
from support.chat_server import ChatServer

SETTINGS = params.load(Path(__file__).parents[2] / "params.yaml")
BOTH = [Probe("bubblewrap", ok=True, explanation="it isolates"), Probe("landlock", ok=True, explanation="it too")]
SECOND = [Probe("bubblewrap", ok=False, explanation="sudo open"), Probe("landlock", ok=True, explanation="it isolates")]
NEITHER = [
    Probe("bubblewrap", ok=False, explanation="sudo open"),
    Probe("landlock", ok=False, explanation="newer kernel"),
]
NONE = Probe("none", ok=True, explanation="no isolation")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[list[Probe]], None]:
    """A machine with a store that can be used, and with the layers given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "connect", lambda settings, root: None)

    def with_layers(probes: list[Probe]) -> None:
        async def probe(settings: params.Sandbox) -> list[Probe]:
            return [*probes, NONE]

        monkeypatch.setattr(sandbox, "probe", probe)

    with_layers(BOTH)
    return with_layers


def found(**changes: dict[str, Any]) -> dict[str, doctor.Finding]:
    sections: dict[str, Any] = {
        name: change if name == "models" else getattr(SETTINGS, name).model_copy(update=change)
        for name, change in changes.items()
    }
    return {finding.what: finding for finding in doctor.examine(SETTINGS.model_copy(update=sections), Path())}


def test_a_machine_with_all_that_is_needed_has_a_line_for_each_thing_and_none_bad(
    machine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor.main(SETTINGS)
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "-"}
    told = "\n".join(lines)
    for part in ("python", "gradeflow[client]", "gradeflow[train]", "vllm", "sandbox: bubblewrap", "sandbox: landlock"):
        assert f" {part} " in told
    for part in (
        "tracking store",
        "model base",
        "base model",
        "disk here",
        "disk for temporary files",
        "memory",
    ):
        assert f" {part} " in told
    assert f"mlflow {version('mlflow')}" in told


def test_vllm_is_found_where_an_evaluation_finds_it(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found()["vllm"].mark == "optional"
    (tmp_path / "vllm").touch()
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert found()["vllm"].said == str(tmp_path / "vllm")


@pytest.mark.parametrize(
    ("probes", "isolation", "marks"),
    [
        (BOTH, "auto", {"bubblewrap": "good", "landlock": "good"}),
        (SECOND, "auto", {"bubblewrap": "optional", "landlock": "good"}),
        (NEITHER, "auto", {"bubblewrap": "bad", "landlock": "bad"}),
        (SECOND, "bubblewrap", {"bubblewrap": "bad"}),
        (SECOND, "landlock", {"landlock": "good"}),
    ],
)
def test_a_layer_is_bad_when_no_other_stands_in_for_it(
    probes: list[Probe], isolation: str, marks: dict[str, str], machine: Any
) -> None:
    machine(probes)
    layers = {
        what.removeprefix("sandbox: "): finding
        for what, finding in found(sandbox={"isolation": isolation}).items()
        if what.startswith("sandbox: ")
    }
    assert {layer: finding.mark for layer, finding in layers.items()} == marks
    used = [layer for layer, finding in layers.items() if "and is used" in finding.said]
    assert used == [layer for layer, mark in marks.items() if mark == "good"][:1]
    assert all(finding.remedy in {"sudo open", "newer kernel"} for finding in layers.values() if finding.mark != "good")


def test_no_isolation_is_never_good(machine: Any) -> None:
    finding = found(sandbox={"isolation": "none"})["sandbox"]
    assert (finding.mark, finding.remedy) == ("optional", "set sandbox.isolation to auto")
    assert "unprotected" in finding.said


def test_what_is_needed_and_missing_ends_in_status_1_and_one_line(
    machine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(settings: params.Tracking, root: Path) -> None:
        raise TrackingError("http://x: no MLflow server answers there. Start the server")

    machine(NEITHER)
    monkeypatch.setattr(tracking, "connect", down)
    with pytest.raises(
        SetupError, match=r"^needed and missing: sandbox: bubblewrap, sandbox: landlock, tracking store$"
    ):
        doctor.main(SETTINGS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("-> ")[2] for line in lines if "sandbox" in line[:12]] == ["sudo open", "newer kernel"]
    assert "BAD tracking store" in "\n".join(lines)
    assert "Start the server" in "\n".join(lines)


def test_models_elsewhere_are_asked(machine: Any) -> None:
    with ChatServer() as server:
        there = params.Model(url=server.url, model="m")
        findings = found(models={"one": there, "two": params.Model(url="http://127.0.0.1:9/v1", model="m", retries=0)})
        assert len(server.bodies) == 1
    assert (findings["model one"].mark, findings["model one"].said) == ("good", f"m at {server.url} answers")
    assert findings["model two"].mark == "bad"
    assert "check the url" in findings["model two"].said


@pytest.mark.parametrize(
    ("model", "mark", "said"),
    [("embedded", "optional", "gradeflow base"), ("Qwen/Qwen2.5-7B-Instruct", "bad", "base.revision")],
)
def test_a_base_model_that_is_not_there(model: str, mark: str, said: str, machine: Any) -> None:
    finding = found(base={"model": model, "revision": ""})["base model"]
    assert finding.mark == mark
    assert said in finding.said + finding.remedy


def test_a_base_that_is_there_is_looked_at_as_before_an_evaluation(machine: Any, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (base / "tokenizer.json").write_text("{}")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"model.embed_tokens.weight": np.zeros((8, 8), np.float32)}, base / "model.safetensors")
    findings = found(base={"model": str(base)})
    assert findings["base model"].said == f"{base}: 1 tensors"
    told = {what: finding.mark for what, finding in findings.items() if what.startswith("evaluate: ")}
    assert list(told) == [f"evaluate: {what}" for what in ("chat template", "context", "GPUs", "memory", "backend")]
    assert "bad" not in told.values()
    (base / "chat_template.jinja").unlink()
    assert found(base={"model": str(base)})["evaluate: chat template"].mark == "bad"
    (base / "tokenizer.json").unlink()
    finding = found(base={"model": str(base)})["base model"]
    assert (finding.mark, "no tokenizer" in finding.said) == ("bad", True)


@pytest.mark.parametrize(
    ("free", "disk", "memory"), [(doctor.GIB, "bad", "optional"), (1000 * doctor.GIB, "good", "good")]
)
def test_room_is_measured(free: int, disk: str, memory: str, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    findings = found()
    assert (findings["disk here"].mark, findings["memory"].mark) == (disk, memory)


@pytest.mark.parametrize(
    ("lacking", "marks"),
    [({"torch"}, ("good", "good", "optional")), ({"openai", "dvc"}, ("bad", "optional", "optional"))],
)
def test_only_the_client_s_packages_are_needed(
    lacking: set[str], marks: tuple[str, str, str], machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: "" if package in lacking else there(package))
    findings = found()
    assert tuple(findings[f"gradeflow[{name}]"].mark for name in ("client", "data", "train")) == marks
    assert all("pip install" in finding.remedy for finding in findings.values() if "missing" in finding.said)
    assert findings["model base"].mark == ("optional" if "torch" in lacking else "good")


def test_it_runs_where_torch_and_its_kin_are_not_installed(tmp_path: Path) -> None:
    """The real command, with the real sandbox and a store of its own."""
    blocked = tmp_path / "sitecustomize.py"
    blocked.write_text("import sys\nfor name in ('torch', 'transformers', 'trl', 'peft'): sys.modules[name] = None\n")
    source = Path(cli.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "gradeflow", "doctor", "--params", str(Path(__file__).parents[2] / "params.yaml")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}", "MLFLOW_TRACKING_URI": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "holds, and is used" in done.stdout


def test_its_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", "--help"])
    told = capsys.readouterr().out
    for part in ("BAD  needed and missing", "exit status", "--sandbox.isolation", "gradeflow doctor --"):
        assert part in told


@pytest.mark.usefixtures("machine")
def test_settings_that_are_known_to_end_badly_are_named_and_not_refused() -> None:
    assert "settings" not in found()
    finding = found(train={"group_size": 2})["settings"]
    assert (finding.mark, finding.said[:24]) == ("optional", "train.group_size is 2, w")
