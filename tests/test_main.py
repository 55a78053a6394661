import subprocess
import sys
from pathlib import Path

import pytest

from gradeflow import __main__ as cli
from gradeflow import params
from gradeflow.errors import ProviderError, SandboxError, SettingsError, TooManyFaults

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def ended(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as raised:
        cli.main(argv)
    return int(str(raised.value.code)), capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([name, "--help"])
    said = capsys.readouterr().out
    assert cli.COMMANDS[name].help in said
    for section in cli.COMMANDS[name].sections:
        assert f"\n{section}:\n" in said


def test_help_shows_type_meaning_and_value_of_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["train_grpo", "--help"])
    assert "--train.lora.rank int  rank [" in capsys.readouterr().out


def test_every_setting_of_the_schema_is_in_some_command_s_help() -> None:
    shown = {section for command in cli.COMMANDS.values() for section in command.sections}
    assert set(params.Params.model_fields) == shown


def test_inputs_settings_and_the_file_are_told_apart() -> None:
    argv = ["places", "--out", "x.jsonl", "--fetch.places.seed", "7", "--params", "p.yaml", "--mix.seed=3"]
    inputs, overrides, path = cli.parse("fetch", cli.COMMANDS["fetch"], argv)
    assert inputs == {"dataset": "places", "out": Path("x.jsonl")}
    assert overrides == {"fetch.places.seed": "7", "mix.seed": "3"}
    assert path == Path("p.yaml")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["tarin"], "tarin: no such command; there are: fetch"),
        (["mix", "--raw", "x"], "required: --out"),
        (["base", "extra"], "extra: not an input of this command"),
        (["base", "--base.seed"], "--base.seed: a value is missing"),
        (["base", "--base.sede", "1"], "base.sede: no such setting; did you mean base.seed?"),
        (["base", "--params", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line_and_status_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, error = ended(argv, capsys)
    assert status == 2
    assert said in error
    assert error.count("\n") == 1


def test_an_unknown_dataset_ends_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, error = ended(["fetch", "nosuch", "--out", str(tmp_path / "x")], capsys)
    assert status == 2
    assert "fetch.nosuch: not in params.yaml; there are: word_problems" in error


def test_importing_the_command_line_imports_no_heavy_library() -> None:
    code = "import gradeflow.__main__, sys; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for heavy in ("torch", "mlflow", "transformers", "pydantic", "trl", "openai"):
        assert f"'{heavy}'" not in done.stdout


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SettingsError("x"), 2),
        (ProviderError("x", cause="unreachable"), 75),
        (ProviderError("x", cause="auth"), 1),
        (TooManyFaults("x", cause="unreachable"), 75),
        (SandboxError("x", cause="sandbox"), 1),
    ],
)
def test_the_status_says_whether_the_same_command_may_go_on_later(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "run", fail)
    assert ended(["train_grpo"], capsys) == (status, "gradeflow: x\n")


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(_: list[str]) -> None:
        raise OSError(28, "No space left on device", "models/x")

    monkeypatch.setattr(cli, "run", full)
    status, error = ended(["base"], capsys)
    assert status == 1
    assert error == (
        "gradeflow: models/x: No space left on device; free some space; nothing was put in place of a good file\n"
    )


def test_an_error_that_the_machine_is_not_to_blame_for_shows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: list[str]) -> None:
        raise OSError(2, "No such file or directory", "models/x")

    monkeypatch.setattr(cli, "run", broken)
    with pytest.raises(FileNotFoundError):
        cli.main(["base"])


def test_a_setting_that_is_refused_says_what_was_expected() -> None:
    with pytest.raises(SettingsError, match=r"train\.max_steps is 0; expected greater than 0"):
        params.load(ROOT / "params.yaml", {"train.max_steps": "0"})


def test_output_that_nobody_reads_to_its_end_is_no_traceback() -> None:
    command = f"{sys.executable} -m gradeflow train_grpo --help | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: gradeflow train_grpo")
    assert done.stderr == ""
