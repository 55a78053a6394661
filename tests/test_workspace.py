"""The workspace: the original's layout, copies only, and no way out of its base."""

import json
import os
import re
from pathlib import Path

import pytest

from gradeflow.errors import DataError
from gradeflow.redact import REDACTED, redact
from gradeflow.workspace import SCHEMA_VERSION, Workspace, submission_name, timestamp

HOSTILE = [
    "../x",
    "../../etc/passwd",
    "/etc/passwd",
    "a b\tc\n",
    "жук-七",
    "x" * 300,
    "",
    ".",
    "..",
    "a\0b",
    "-rf",
    "CON",
]


def test_a_run_has_the_folders_of_the_original(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, "mamo-ode.1 b")
    assert re.fullmatch(r"modeling_run_mamo_ode_1_b_[0-9a-f]{8}", workspace.run_name)
    made = sorted(path.relative_to(workspace.run_dir).as_posix() for path in workspace.run_dir.rglob("*"))
    assert made == ["artifacts", "artifacts/telemetry", "candidates", "logs", "sandbox", "state"]


def test_submissions_are_named_after_their_task() -> None:
    assert re.fullmatch(r"submission_industry-0_[0-9a-f]{6}\.csv", submission_name("industry-0"))
    assert submission_name("industry-0") != submission_name("industry-0")


@pytest.mark.parametrize("task_id", HOSTILE)
def test_no_task_id_leads_out_of_the_base(tmp_path: Path, task_id: str) -> None:
    workspace = Workspace(tmp_path / "base", task_id)
    assert workspace.run_dir.parent == tmp_path / "base"
    assert workspace.sandbox.is_dir()
    name = submission_name(task_id)
    assert Path(name).name == name
    (workspace.sandbox / name).touch()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_public_files_are_copied_with_their_folders(tmp_path: Path) -> None:
    public = tmp_path / "public"
    (public / "images").mkdir(parents=True)
    (public / "problem.json").write_text("{}")
    (public / "images" / "1.png").write_bytes(b"\x89")
    workspace = Workspace(tmp_path / "runs", "t")
    workspace.copy_public(public)
    copies = [workspace.sandbox / "problem.json", workspace.sandbox / "images" / "1.png"]
    assert all(path.is_file() and not path.is_symlink() for path in copies)
    copies[0].write_text("spoilt by the agent")
    assert (public / "problem.json").read_text() == "{}"


@pytest.mark.parametrize("target", ["../private/answer.csv", "../private", "problem.json", "nowhere"])
def test_a_link_among_the_public_files_is_refused(tmp_path: Path, target: str) -> None:
    public = tmp_path / "public" / "deep"
    public.mkdir(parents=True)
    (tmp_path / "public" / "private").mkdir()
    (tmp_path / "public" / "private" / "answer.csv").write_text("42")
    (public / "data").symlink_to(target)
    workspace = Workspace(tmp_path / "runs", "t")
    with pytest.raises(DataError, match="data: a link"):
        workspace.copy_public(public)
    assert list(workspace.sandbox.iterdir()) == []


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="no plain file"):
        Workspace(tmp_path / "runs", "t").copy_public(tmp_path)


def test_a_missing_public_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such folder"):
        Workspace(tmp_path, "t").copy_public(tmp_path / "nowhere")


def test_a_base_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        Workspace(tmp_path / "file", "t")


def test_telemetry_is_one_json_value_a_line_without_a_last_line_break(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, "t")
    for turn in range(3):
        workspace.record("conversation", {"turn": turn, "text": "é\n\ud800"})
    lines = (workspace.telemetry / "conversation.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["turn"] for line in lines] == [0, 1, 2]
    assert "é" in lines[0]


def test_metadata_names_its_schema(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, "t")
    workspace.write_metadata({"run_name": "r"})
    kept = json.loads((workspace.telemetry / "run_metadata.json").read_text())
    assert kept == {"schema_version": SCHEMA_VERSION, "run_name": "r"}


def test_moments_are_written_as_utc_with_z() -> None:
    assert timestamp(0.5) == "1970-01-01T00:00:00.500000Z"
    assert timestamp(0) == "1970-01-01T00:00:00.000000Z"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", timestamp())


def test_nothing_that_is_kept_holds_a_named_secret(tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    workspace = Workspace(tmp_path, "t", secrets=[secret])
    workspace.record("conversation", {"text": f"key is {secret}!", "nested": [{secret: secret}]})
    workspace.write_metadata({"config_snapshot": {"api_key": "EMPTY"}, "text": secret})
    workspace.keep_script(f"key = '{secret}'")
    kept = [path.read_text() for path in workspace.run_dir.rglob("*") if path.is_file()]
    assert len(kept) == 3
    assert not any(secret in text or "EMPTY" in text for text in kept)
    assert all(REDACTED in text for text in kept)


@pytest.mark.parametrize(
    "name",
    ["api_key", "API_KEY", "apiKey", "openai_api_key", "aws_secret_access_key", "password", "hub_token"],
)
def test_values_with_the_name_of_a_secret_are_blanked_out(name: str) -> None:
    assert redact({"a": [{name: "short"}]}) == {"a": [{name: REDACTED}]}


@pytest.mark.parametrize(
    "text",
    [
        "sk-abcdefghijklmnop1234",
        "hf_abcdefghijklmnop1234",
        "AKIAABCDEFGHIJKLMNOP",
        "ghp_abcdefghijklmnopqrst1234",
    ],
)
def test_what_looks_like_a_key_is_blanked_out(text: str) -> None:
    assert redact(f"use {text}, please") == f"use {REDACTED}, please"


def test_credentials_in_a_url_and_in_a_header_are_blanked_out() -> None:
    assert redact("http://me:pw@host/v1") == f"http://{REDACTED}@host/v1"
    assert redact("Authorization: Bearer abcdefghijklmnop") == f"Authorization: Bearer {REDACTED}"


def test_what_is_no_secret_stays() -> None:
    kept = {
        "api_key": "",
        "api_key_env": "OPENAI_API_KEY",
        "max_tokens": 4096,
        "prompt_tokens": 3,
        "text": "EMPTY risk-free",
    }
    assert redact(kept, secrets=["EMPTY", ""]) == kept
