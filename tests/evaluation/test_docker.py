import json
import os
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params
from gradeflow.errors import EvaluationError, SettingsError, SetupError
from gradeflow.evaluation import docker, plan
from gradeflow.evaluation.original import BenchmarkDocker, FineTune
from gradeflow.evaluation.plan import Plan, Subject
from gradeflow.server import gateway
from support import docker_stand_in as stand_in

ROOT = Path(__file__).parents[2]
NAME = "gradeflow-evaluate-test"


@pytest.fixture
def settings() -> params.Evaluate:
    return params.load(ROOT / "params.yaml", {"evaluate.tasks": "[gsm8k]"}).evaluate


@pytest.fixture
def planned(tmp_path: Path, settings: params.Evaluate) -> Plan:
    whole = params.load(ROOT / "params.yaml")
    for name in ("base", "adapter", "tasks", "gsm8k", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine/task.yaml").touch()
    update = {
        "include": [str(tmp_path / "tasks")],
        "data": {"openai/gsm8k": str(tmp_path / "gsm8k")},
        "cache": str(tmp_path / "replies"),
    }
    return Plan(
        base=str(tmp_path / "base"),
        revision="",
        base_digest="0" * 64,
        dtype="auto",
        subjects=[Subject(plan.BASE), Subject("0123456789ab", "0123456789ab", str(tmp_path / "adapter"), 8)],
        tasks=["gsm8k", str(tmp_path / "mine/task.yaml")],
        backend="vllm",
        params=whole.model_copy(update={"evaluate": settings.model_copy(update=update)}),
        out=str(tmp_path / "out"),
    )


def acting(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the client that acts a part before any real one; returns its notes."""
    notes = stand_in.put(folder / "bin", part)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return notes


def values(argv: list[str], flag: str) -> list[str]:
    return [value for name, value in pairwise(argv) if name == flag]


def mounts(argv: list[str]) -> dict[str, bool]:
    """What is mounted at its own path, and whether it may be written."""
    found = {}
    for row in values(argv, "--mount"):
        kind, source, target, *rest = row.split(",")
        assert (kind, source.removeprefix("source=")) == ("type=bind", target.removeprefix("target="))
        found[target.removeprefix("target=")] = rest != ["readonly"]
    return found


def test_a_container_reads_what_the_plan_reads_and_writes_what_it_writes(planned: Plan, tmp_path: Path) -> None:
    found = mounts(docker.command(planned, planned.settings.docker, name=NAME))
    read = {str(tmp_path / name): False for name in ("base", "adapter", "tasks", "gsm8k", "mine")}
    written = {str(tmp_path / name): True for name in ("out", "replies")}
    assert found.items() >= (read | written).items()


def test_a_container_is_limited_and_named_and_is_not_root_with_powers(planned: Plan) -> None:
    argv = docker.command(planned, planned.settings.docker, name=NAME)
    assert argv[:2] == ["docker", "run"]
    assert {"--rm", "--init"} <= set(argv)
    told = {"--name": NAME, "--memory": "32g", "--shm-size": "8g", "--gpus": "all", "--pull": "never"}
    told |= {"--user": f"{os.getuid()}:{os.getgid()}", "--cap-drop": "ALL", "--security-opt": "no-new-privileges"}
    assert {flag: values(argv, flag) for flag in told} == {flag: [value] for flag, value in told.items()}


def test_the_worker_gets_the_plan_and_ends_by_itself_when_time_is_up(planned: Plan) -> None:
    argv = docker.command(planned, planned.settings.docker, name=NAME)
    where = argv.index("--entrypoint")
    image, plan_file = planned.settings.docker.image, f"{planned.out}/plan.json"
    worker = ["python", "-m", "gradeflow.evaluation.worker", plan_file]
    assert argv[where + 1 :] == ["timeout", image, "--kill-after=10", "3600", *worker]
    endless = planned.settings.model_copy(update={"timeout_s": 0})
    forever = replace(planned, params=planned.params.model_copy(update={"evaluate": endless}))
    argv = docker.command(forever, planned.settings.docker, name=NAME)
    assert argv[argv.index("--entrypoint") + 1 :] == ["python", image, *worker[1:]]


def test_a_base_in_a_folder_needs_no_network(planned: Plan) -> None:
    argv = docker.command(planned, planned.settings.docker, name=NAME)
    assert values(argv, "--network") == ["none"]
    assert {"HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1"} <= set(values(argv, "--env"))
    assert "HF_TOKEN" not in values(argv, "--env")


def test_a_base_from_the_hub_has_the_network_and_a_cache_to_write(
    planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub = replace(planned, base="Qwen/Qwen2.5-7B", revision="0123abc")
    argv = docker.command(hub, planned.settings.docker, name=NAME)
    assert not values(argv, "--network")
    assert "HF_HUB_OFFLINE=1" not in argv
    assert mounts(argv)[str(tmp_path / "HF_HUB_CACHE")]
    assert "HF_TOKEN" in values(argv, "--env")
    assert not any("hf_secret" in word for word in argv)
    argv = docker.command(hub, planned.settings.docker, name=NAME, online=False)
    assert values(argv, "--network") == ["none"]
    assert not mounts(argv)[str(tmp_path / "HF_HUB_CACHE")]
    assert f"HF_DATASETS_CACHE={tmp_path / 'HF_DATASETS_CACHE'}" in values(argv, "--env")


def test_what_links_in_the_base_lead_to_is_there_too(planned: Plan, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/0a1b").touch()
    (tmp_path / "base/model.safetensors").symlink_to("../blobs/0a1b")
    (tmp_path / "base/gone").symlink_to("../blobs/gone")
    found = mounts(docker.command(planned, planned.settings.docker, name=NAME))
    assert found[str(tmp_path / "blobs/0a1b")] is False
    assert not any("gone" in path for path in found)


def created(argv: list[str], folder: Path) -> dict[str, Any]:
    """The container that the real client asks an engine for when it is given a command."""
    client = shutil.which("docker")
    if client is None:
        pytest.skip("needs Docker's client")
    with stand_in.engine(folder / "engine.sock") as wanted:
        environment = os.environ | {"DOCKER_HOST": f"unix://{folder}/engine.sock", "DOCKER_CONFIG": str(folder)}
        subprocess.run([client, "create", *argv[2:]], env=environment, check=True, capture_output=True)
    (container,) = wanted
    return container


def test_dockers_own_client_understands_the_command(planned: Plan, tmp_path: Path) -> None:
    odd = tmp_path / 'base, "quoted": it\'s'
    (tmp_path / "base").rename(odd)
    docker_settings = planned.settings.docker.model_copy(update={"gpus": "device=0,1"})
    container = created(docker.command(replace(planned, base=str(odd)), docker_settings, name=NAME), tmp_path)
    host = container["HostConfig"]
    assert (host["Memory"], host["ShmSize"], host["NetworkMode"]) == (32 << 30, 8 << 30, "none")
    assert host["DeviceRequests"][0]["DeviceIDs"] == ["0", "1"]
    assert {"Type": "bind", "Source": str(odd), "Target": str(odd), "ReadOnly": True} in host["Mounts"]
    assert container["Entrypoint"] == ["timeout"]
    assert container["Cmd"][-1] == f"{planned.out}/plan.json"


def test_a_plan_is_written_and_carried_out(
    planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = acting("0", tmp_path, monkeypatch)
    docker.measure(planned, planned.settings.docker)
    assert Plan.read(Path(planned.out) / "plan.json") == planned
    ((command, *_),) = stand_in.asked(notes)
    assert command == "run"
    assert capsys.readouterr().out == "loading\nhalf a line"


@pytest.mark.parametrize(
    ("part", "status", "said"),
    [("1", 1, "status 1"), ("124", 124, "evaluate.timeout_s"), ("137", 137, "more than evaluate.docker.memory, 32g")],
)
def test_a_worker_that_fails_in_the_container_is_an_error_with_its_status(
    part: str, status: int, said: str, planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting(part, tmp_path, monkeypatch)
    with pytest.raises(EvaluationError, match=said) as caught:
        docker.measure(planned, planned.settings.docker)
    assert caught.value.status == status
    assert "half a line" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ("no engine", "systemctl start docker"),
        ("no image", "docker build --file docker/evaluate.Dockerfile"),
        ("no gpu", "NVIDIA's container toolkit"),
        ("no entry", "docker build --file docker/evaluate.Dockerfile"),
    ],
)
def test_a_container_that_cannot_start_is_told_with_a_remedy(
    part: str, remedy: str, planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting(part, tmp_path, monkeypatch)
    with pytest.raises(SetupError, match=remedy):
        docker.measure(planned, planned.settings.docker)


def test_without_docker_the_message_says_what_to_do(
    planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"docker: No such file.*\n?.*evaluate.where local"):
        docker.measure(planned, planned.settings.docker)


@pytest.mark.parametrize("part", ["hang", "hang on"])
def test_a_container_beyond_its_time_is_killed(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = acting(part, tmp_path, monkeypatch)
    ended = docker.run(["docker", "run", "image"], name=NAME, timeout_s=1, grace_s=0)
    assert ended == docker.Ended(124, "loading\nhalf a line")
    assert stand_in.asked(notes) == [["run", "image"], ["kill", NAME]]


def test_a_worker_that_had_to_be_killed_when_its_time_was_up_is_no_matter_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting("end late", tmp_path, monkeypatch)
    assert docker.run(["docker", "run", "image"], name=NAME, timeout_s=1).status == 124
    assert docker.run(["docker", "run", "image"], name=NAME, timeout_s=600).status == 137


def test_a_container_does_not_outlive_who_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = acting("hang", tmp_path, monkeypatch)

    def interrupted(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        docker.run(["docker", "run", "image"], name=NAME, show=interrupted)
    assert stand_in.asked(notes)[-1] == ["kill", NAME]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    (folder / "output").mkdir(parents=True)
    return folder


@pytest.fixture
def told(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "files/models/small").mkdir(parents=True)
    named = {"FT_FILE_PATH": str(tmp_path / "files"), "FT_BASE_MODEL": "small", "FT_BENCHMARK_DATASETS": "gsm8k,mmlu"}
    return {"PATH": os.environ["PATH"]} | named


def evaluate(told: dict[str, str]) -> params.Evaluate:
    overrides = BenchmarkDocker.read(told).overrides() | FineTune.read(told).overrides()
    return params.load(ROOT / "params.yaml", overrides).evaluate


def test_the_originals_entry_runs_in_the_workspace_with_the_originals_variables(
    workspace: Path, told: dict[str, str], tmp_path: Path
) -> None:
    argv = docker.original_command(workspace, told, evaluate(told), name=NAME)
    base, benchmarks = tmp_path / "files/models/small", tmp_path / "files/benchmarks"
    assert values(argv, "--mount") == [
        f"type=bind,source={workspace},target=/workspace",
        f"type=bind,source={base},target={base},readonly",
        f"type=bind,source={benchmarks},target=/workspace/benchmarks",
    ]
    assert set(values(argv, "--env")) == {
        "BENCHMARK_TASKS=gsm8k,mmlu",
        f"BASE_MODEL={base}",
        "ADAPTER_PATH=/workspace/output",
        "OUTPUT_DIR=/workspace/benchmark_results",
        "HF_DATASETS_CACHE=/workspace/benchmarks",
        "HF_TOKEN",
    }
    entry = ["bash", "/app/eval_entrypoint.sh"]
    where = argv.index("--entrypoint")
    assert argv[where + 1 :] == ["timeout", "gradeflow-evaluate:latest", "--kill-after=10", "3600", *entry]


def test_dockers_variables_of_the_original_are_honoured(workspace: Path, told: dict[str, str]) -> None:
    told |= {
        "BENCHMARK_DOCKER_IMAGE": "mine:1",
        "BENCHMARK_DOCKER_MOUNT_PATH": "/elsewhere",
        "BENCHMARK_DOCKER_DEFAULT_ENTRY": "sh '/a b.sh' --quiet",
        "BENCHMARK_DOCKER_RUNNING_TIMEOUT_PERIOD": "0",
        "BENCHMARK_DOCKER_MEM_LIMIT": "64g",
        "BENCHMARK_DOCKER_SHM_SIZE": "16g",
        "BENCHMARK_DOCKER_ENABLE_GPU": "false",
    }
    argv = docker.original_command(workspace, told, evaluate(told), name=NAME)
    assert argv[argv.index("--entrypoint") + 1 :] == ["sh", "mine:1", "/a b.sh", "--quiet"]
    assert (values(argv, "--memory"), values(argv, "--shm-size"), values(argv, "--gpus")) == (["64g"], ["16g"], [])
    assert "ADAPTER_PATH=/elsewhere/output" in values(argv, "--env")


def test_the_containers_own_variables_are_handed_on_and_checked_first(workspace: Path, told: dict[str, str]) -> None:
    argv = docker.original_command(workspace, told | {"NUM_GPUS": "2", "LIMIT": "10"}, evaluate(told), name=NAME)
    assert {"NUM_GPUS=2", "LIMIT=10"} <= set(values(argv, "--env"))
    with pytest.raises(SettingsError, match="NUM_GPUS is 'four'"):
        docker.original_command(workspace, told | {"NUM_GPUS": "four"}, evaluate(told), name=NAME)


def test_offline_means_no_network_and_no_library_that_asks_for_one(workspace: Path, told: dict[str, str]) -> None:
    argv = docker.original_command(workspace, told | {"HF_DATASETS_OFFLINE": "1"}, evaluate(told), name=NAME)
    assert values(argv, "--network") == ["none"]
    assert {"HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", "HF_EVALUATE_OFFLINE=1"} <= set(values(argv, "--env"))


def test_a_hostile_name_stays_one_argument(workspace: Path, told: dict[str, str], tmp_path: Path) -> None:
    hostile = f"x; touch {tmp_path / 'pwned'} $(touch {tmp_path / 'pwned'}) ' \""
    told |= {"FT_BENCHMARK_DATASETS": hostile, "FT_BASE_MODEL": hostile, "BENCHMARK_DOCKER_TERMINAL_TAIL_LINES": "0"}
    notes = stand_in.put(tmp_path / "bin", "0")
    told["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{told['PATH']}"
    docker.original(workspace, told, evaluate(told), project=ROOT)
    *_, asked = stand_in.asked(notes)
    assert {f"BENCHMARK_TASKS={hostile}", f"BASE_MODEL={hostile}"} <= set(asked)
    assert not (tmp_path / "pwned").exists()


def test_the_original_builds_runs_keeps_its_log_and_shows_its_last_lines(
    workspace: Path, told: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = stand_in.put(tmp_path / "bin", "3")
    told["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{told['PATH']}"
    told["BENCHMARK_DOCKER_TERMINAL_TAIL_LINES"] = "1"
    ended = docker.original(workspace, told, evaluate(told), project=ROOT)
    assert ended == docker.Ended(3, "loading\nhalf a line")
    assert (workspace / "benchmark_results/evaluate.log").read_text() == ended.output
    shown = capsys.readouterr().out
    assert "half a line" in shown
    assert "loading" not in shown
    build, run = stand_in.asked(notes)
    assert build[:3] == ["build", "--file", str(ROOT / "docker/evaluate.Dockerfile")]
    assert run[0] == "run"


def test_the_original_builds_and_keeps_nothing_where_it_is_told_so(
    workspace: Path, told: dict[str, str], tmp_path: Path
) -> None:
    notes = stand_in.put(tmp_path / "bin", "0")
    told["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{told['PATH']}"
    told |= {"BENCHMARK_DOCKER_BUILD_FROM_DOCKERFILE": "false", "BENCHMARK_DOCKER_SAVE_LOGS_TO_FILE": "false"}
    docker.original(workspace, told, evaluate(told), project=ROOT)
    assert [words[0] for words in stand_in.asked(notes)] == ["run"]
    assert list((workspace / "benchmark_results").iterdir()) == []


def test_the_originals_evaluator_says_which_tasks_and_how_many_questions(
    workspace: Path, told: dict[str, str], tmp_path: Path
) -> None:
    notes = stand_in.put(tmp_path / "bin", "0")
    told["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{told['PATH']}"
    run = docker.runner(told, evaluate(told), project=ROOT)
    assert run(workspace, ["hellaswag", "arc_easy"], 10).status == 0
    assert run(workspace, ["hellaswag"], None).status == 0
    first, second = (words for words in stand_in.asked(notes) if words[0] == "run")
    assert {"BENCHMARK_TASKS=hellaswag,arc_easy", "LIMIT=10"} <= set(first)
    assert not any(word.startswith("LIMIT=") for word in second)


def test_an_image_that_cannot_be_built_ends_before_anything_runs(
    workspace: Path, told: dict[str, str], tmp_path: Path
) -> None:
    notes = stand_in.put(tmp_path / "bin", "cannot build")
    told["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{told['PATH']}"
    with pytest.raises(SetupError, match="docker build ended with status 1:\nbuilding"):
        docker.original(workspace, told, evaluate(told), project=ROOT)
    assert len(stand_in.asked(notes)) == 1


def dockerfile(name: str = "evaluate") -> list[tuple[str, str]]:
    """Its instructions and their arguments, with continued lines as one."""
    text = (ROOT / f"docker/{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_what_commands_and_documents_say_of_it() -> None:
    found = dockerfile()
    (entry,) = [json.loads(rest) for name, rest in found if name == "ENTRYPOINT"]
    assert entry == ["/app/eval_entrypoint.sh"]
    assert ("USER", "1000:1000") in found
    (environment,) = [rest.split() for name, rest in found if name == "ENV"]
    assert "HF_DATASETS_CACHE=/workspace/benchmarks" in environment


def test_the_serving_image_starts_the_command_asks_whether_it_is_ready_and_lets_requests_end() -> None:
    found = dict(dockerfile("serve"))
    program, stage, *options = json.loads(found["ENTRYPOINT"])
    assert (program, stage) == ("gradeflow", "serve")
    given = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    loaded = params.load(ROOT / "params.yaml", given)
    assert (loaded.serve.host, loaded.serve.port) == ("0.0.0.0", int(found["EXPOSE"]))
    assert loaded.serve.api_key_env
    assert f"http://127.0.0.1:{found['EXPOSE']}/ready" in found["HEALTHCHECK"]
    assert "/ready" in gateway.OPEN
    assert found["STOPSIGNAL"] == "SIGTERM"
    assert found["USER"] == "1000:1000"


def test_the_image_copies_only_what_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    instructions = [*dockerfile(), *dockerfile("serve")]
    copied = [word for name, rest in instructions if name == "COPY" for word in rest.split()[:-1]]
    files = {word for word in copied if not word.startswith("--")}
    assert files == kept
    assert all((ROOT / file).exists() for file in files)
