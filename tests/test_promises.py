"""What the files at the root promise: they fit the schema and the commands, and hold nothing that must not be there."""

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ruamel.yaml

from gradeflow import __main__ as cli
from gradeflow import params, sources

ROOT = Path(__file__).parents[1]
YAML = ruamel.yaml.YAML(typ="safe", pure=True)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_params_yaml_fits_the_schema_and_every_source_exists() -> None:
    settings = params.load(ROOT / "params.yaml")
    for name in settings.fetch:
        sources.load(name)


@pytest.mark.parametrize("profile", sorted((ROOT / "profiles").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_profile_names_only_known_sections_and_datasets(profile: Path) -> None:
    tree = YAML.load(profile.read_text())
    assert set(tree) <= set(params.Params.model_fields)
    for name in {*tree.get("fetch", {}), *tree.get("mix", {}).get("weights", {})}:
        sources.load(name)


def test_every_entry_point_of_mlproject_is_a_command() -> None:
    project = YAML.load((ROOT / "MLproject").read_text())
    for name, entry in project["entry_points"].items():
        command = entry["command"].split()[2]
        assert command == ("chain" if name == "main" else name)
        known = {given.name for given in cli.COMMANDS[command].inputs} | set(cli.COMMANDS[command].short)
        assert set(entry.get("parameters", {})) <= known


def test_every_stage_of_dvc_yaml_is_a_command_with_its_inputs() -> None:
    stages = YAML.load((ROOT / "dvc.yaml").read_text())["stages"]
    for name, stage in stages.items():
        command = stage.get("do", stage)["cmd"].replace("${key}", "places").split()[2:]
        assert command[0] == name
        cli.parse(name, cli.COMMANDS[name], command[1:])


def test_without_params_yaml_dvc_names_the_file(tmp_path: Path) -> None:
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "--no-scm", "--quiet"], cwd=tmp_path, check=True)
    done = subprocess.run([*dvc, "repro"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "'params.yaml' does not exist" in done.stderr


def test_dvc_lock_belongs_to_this_code_and_these_settings() -> None:
    """On a clean clone `dvc repro` must make what dvc.lock says, so its recorded inputs must be the tree's."""
    lock = YAML.load((ROOT / "dvc.lock").read_text())["stages"]
    tree = YAML.load((ROOT / "params.yaml").read_text())
    assert set(lock) == {f"fetch@{name}" for name in tree["fetch"]} | {"mix"}
    assert lock["mix"]["params"]["params.yaml"] == {"mix": tree["mix"]}
    for name, values in tree["fetch"].items():
        assert lock[f"fetch@{name}"]["params"]["params.yaml"] == {f"fetch.{name}": values}


def test_an_entry_point_runs_without_pyenv_and_without_an_active_environment(tmp_path: Path) -> None:
    """`mlflow run` must neither look for pyenv nor build a second environment."""
    bin_folder = Path(sys.executable).parent
    if not (ROOT / ".venv" / "bin" / "gradeflow").exists():
        pytest.skip("the project's .venv is not set up; tests run in another environment")
    environment = {
        "PATH": f"{shutil.which('git') and Path(shutil.which('git')).parent}:/usr/bin:/bin",  # type: ignore[arg-type]
        "HOME": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "MLFLOW_ENV_ROOT": str(tmp_path / "environments"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    done = subprocess.run(
        [str(bin_folder / "mlflow"), "run", str(ROOT), "-e", "base", "-P", "base.seed=nonsense"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "base.seed is 'nonsense'; expected a valid integer" in done.stderr
    assert not (tmp_path / "environments").exists()


def test_without_set_up_the_launcher_names_the_command_to_run(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "bin" / "gradeflow", tmp_path / "bin")
    done = subprocess.run(
        ["/bin/sh", "bin/gradeflow", "base"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "gradeflow: the environment is not set up yet; run: make setup\n"


def test_no_path_of_a_machine_and_no_registry_s_host_is_in_the_tree() -> None:
    home = re.escape(str(Path.home()))
    found = []
    hosts = [f"{name}.{domain}" for name, domain in (("files", "pythonhosted"), ("pypi", "org/simple"))]
    forbidden = re.compile("|".join([re.escape(str(ROOT)), rf"{home}/\w", *map(re.escape, hosts)]))
    for path in tracked():
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in forbidden.finditer(text)]
    assert found == []


def test_no_large_file_is_tracked() -> None:
    assert [path for path in tracked() if path.stat().st_size > 1 << 20] == []


def documented_commands() -> list[list[str]]:
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    whole = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines = [line.split("  #")[0].strip() for line in whole]
    words = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    return [list(itertools.dropwhile(lambda word: re.match("[A-Z_]+=", word), line)) for line in words]


@pytest.mark.parametrize("command", documented_commands(), ids=" ".join)
def test_every_documented_command_is_one_that_exists(command: list[str]) -> None:
    program, *rest = command
    match program:
        case "gradeflow":
            if rest and rest[0] != "--help":
                cli.parse(rest[0], cli.COMMANDS[rest[0]], [word for word in rest[1:] if word != "--help"])
        case "make":
            targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(rest) <= set(targets)
        case "mlflow":
            if rest[0] == "run" and "-e" in rest:
                entry_points = YAML.load((ROOT / "MLproject").read_text())["entry_points"]
                assert rest[rest.index("-e") + 1] in entry_points
            settings = [word for flag, word in itertools.pairwise(rest) if flag == "-P" and "." in word]
            params.load(ROOT / "params.yaml", dict(word.split("=", 1) for word in settings))
        case "dvc":
            settings = [word for flag, word in itertools.pairwise(rest) if flag == "-S"]
            params.load(ROOT / "params.yaml", dict(word.split("=", 1) for word in settings))
        case _:
            assert program in {"git", "cd", "export", "vllm", "curl", "python", "docker"}
