import os
from pathlib import Path

import pytest

from gradeflow import params
from gradeflow.errors import SettingsError
from gradeflow.evaluation import original
from gradeflow.evaluation.original import BenchmarkDocker, Container, FineTune

ROOT = Path(__file__).parents[2]


def loaded(overrides: dict[str, str]) -> params.Params:
    return params.load(ROOT / "params.yaml", overrides)


def test_a_container_that_is_told_the_base_alone_has_the_originals_defaults() -> None:
    found = Container.read({"BASE_MODEL": "Qwen/Qwen2.5-7B"})
    assert found.benchmark_tasks == ["gsm8k"]
    assert found.adapter_path == "/workspace/output"
    assert found.output_dir == Path("/workspace/benchmark_results")
    assert found.hf_datasets_cache == Path("/workspace/benchmarks")
    settings = loaded(found.overrides()).evaluate
    assert (settings.limit, settings.batch_size, settings.gpus) == (0, 0, 1)
    assert settings.chat_template
    assert settings.gpu_memory == 0.8


def test_every_variable_of_the_container_arrives() -> None:
    found = Container.read(
        {
            "BASE_MODEL": "/models/base",
            "BENCHMARK_TASKS": "gsm8k, mmlu,,gsm8k",
            "ADAPTER_PATH": "/a",
            "OUTPUT_DIR": "/out",
            "LIMIT": "10",
            "BATCH_SIZE": "8",
            "NUM_GPUS": "2",
            "HF_DATASETS_CACHE": "/cache",
            "HF_ALLOW_CODE_EVAL": "1",
        }
    )
    assert (found.adapter_path, found.output_dir, found.hf_datasets_cache) == ("/a", Path("/out"), Path("/cache"))
    settings = loaded(found.overrides())
    assert settings.base.model == "/models/base"
    assert settings.evaluate.tasks == ["gsm8k", "mmlu"]
    assert (settings.evaluate.limit, settings.evaluate.batch_size, settings.evaluate.gpus) == (10, 8, 2)
    assert settings.evaluate.confirm_run_unsafe_code


@pytest.mark.parametrize("text", ["auto", "auto:4"])
def test_a_batch_may_be_as_large_as_fits(text: str) -> None:
    assert Container.read({"BASE_MODEL": "b", "BATCH_SIZE": text}).batch_size == 0


def test_no_machine_is_taken_to_have_four_gpus() -> None:
    assert Container.read({"BASE_MODEL": "b"}).num_gpus == 1
    assert Container.read({"BASE_MODEL": "b", "NUM_GPUS": "8"}).num_gpus == 8


def test_generated_code_needs_consent() -> None:
    assert not loaded(Container.read({"BASE_MODEL": "b"}).overrides()).evaluate.confirm_run_unsafe_code


@pytest.mark.parametrize(
    "name", ["x; touch /tmp/pwned", "$(id)", "`id`", "two words", 'it\'s "quoted"', "{a: b} # c", "-x", "数学"]
)
def test_a_name_is_only_a_name(name: str) -> None:
    found = loaded(Container.read({"BASE_MODEL": name, "BENCHMARK_TASKS": name}).overrides())
    assert found.base.model == name
    assert found.evaluate.tasks == [name]


@pytest.mark.parametrize("text", ["gsm8k,mmlu", " gsm8k , mmlu ", '["gsm8k", "mmlu"]', '["gsm8k","mmlu","gsm8k"]'])
def test_tasks_are_a_list_in_json_or_with_commas(text: str) -> None:
    found = FineTune.read({"FT_BASE_MODEL": "b", "FT_BENCHMARK_DATASETS": text})
    assert found.benchmark_datasets == ["gsm8k", "mmlu"]


@pytest.mark.parametrize(
    ("variables", "name", "value", "expected"),
    [
        (Container, "BASE_MODEL", "", "not set; expected the base model"),
        (Container, "BENCHMARK_TASKS", " , ", "expected names of tasks"),
        (Container, "BENCHMARK_TASKS", '["gsm8k"', "expected names of tasks"),
        (Container, "LIMIT", "0.5", "expected a number of questions"),
        (Container, "LIMIT", "0", "expected a number of questions"),
        (Container, "BATCH_SIZE", "many", "expected auto"),
        (Container, "NUM_GPUS", "0", "expected a number of GPUs"),
        (Container, "HF_ALLOW_CODE_EVAL", "perhaps", "expected 1"),
        (FineTune, "FT_BASE_MODEL", "", "not set; expected the base model"),
        (FineTune, "FT_BENCHMARK_DATASETS", "[1, 2]", "expected names of tasks"),
        (FineTune, "FT_BENCHMARK_DATASETS", "[]", "expected names of tasks"),
        (FineTune, "FT_BENCHMARK_TIMEOUT", "1h", "expected a whole number of seconds"),
        (BenchmarkDocker, "BENCHMARK_DOCKER_MOUNT_PATH", "workspace", "expected an absolute path"),
        (BenchmarkDocker, "BENCHMARK_DOCKER_DEFAULT_ENTRY", "bash 'x", "expected a command"),
        (BenchmarkDocker, "BENCHMARK_DOCKER_RUNNING_TIMEOUT_PERIOD", "-1", "expected a whole number of seconds"),
        (BenchmarkDocker, "BENCHMARK_DOCKER_MEM_LIMIT", "lots", "expected memory as Docker writes it"),
        (BenchmarkDocker, "BENCHMARK_DOCKER_SHM_SIZE", "8 GB", "expected memory as Docker writes it"),
        (BenchmarkDocker, "BENCHMARK_DOCKER_ENABLE_GPU", "2", "expected true or false"),
        (BenchmarkDocker, "BENCHMARK_DOCKER_TERMINAL_TAIL_LINES", "all", "expected a number of lines"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_expected(
    variables: type[original.Variables], name: str, value: str, expected: str
) -> None:
    good = {"BASE_MODEL": "b", "FT_BASE_MODEL": "b"}
    with pytest.raises(SettingsError) as caught:
        variables.read(good | {name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert repr(value) in message or not value
    assert expected in message


def test_all_wrong_values_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Container.read({"LIMIT": "x", "NUM_GPUS": "y"})
    assert [line.partition(" ")[0] for line in str(caught.value).splitlines()] == ["BASE_MODEL", "LIMIT", "NUM_GPUS"]


def test_the_fine_tuning_settings_find_models_and_datasets_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "models/Qwen/small").mkdir(parents=True)
    told = {"FT_FILE_PATH": str(tmp_path), "FT_DATASET": "mine"}
    found = FineTune.read(told | {"FT_BASE_MODEL": "Qwen/small"})
    assert found.base == str(tmp_path / "models/Qwen/small")
    assert found.benchmarks == tmp_path / "benchmarks"
    assert found.dataset_folder == tmp_path / "datasets/mine"
    assert FineTune.read(told | {"FT_BASE_MODEL": "Qwen/other"}).base == "Qwen/other"


def test_the_fine_tuning_settings_have_the_originals_defaults() -> None:
    found = FineTune.read({"FT_BASE_MODEL": "b"})
    assert found.benchmark_datasets == ["mmlu"]
    assert loaded(found.overrides()).evaluate.timeout_s == 3600


def test_the_evaluators_time_goes_before_dockers() -> None:
    both = {"FT_BASE_MODEL": "b", "FT_BENCHMARK_TIMEOUT": "60", "BENCHMARK_DOCKER_RUNNING_TIMEOUT_PERIOD": "7200"}
    docker = BenchmarkDocker.read(both).overrides()
    assert loaded(docker).evaluate.timeout_s == 7200
    assert loaded(docker | FineTune.read(both).overrides()).evaluate.timeout_s == 60


def test_dockers_variables_that_are_set_overrule_params() -> None:
    found = BenchmarkDocker.read(
        {
            "BENCHMARK_DOCKER_IMAGE": "mine:1",
            "BENCHMARK_DOCKER_MEM_LIMIT": "64g",
            "BENCHMARK_DOCKER_SHM_SIZE": "16g",
            "BENCHMARK_DOCKER_ENABLE_GPU": "false",
        }
    )
    docker = loaded(found.overrides()).evaluate.docker
    assert docker == params.Docker(image="mine:1", memory="64g", shm_size="16g", gpus="")


def test_without_dockers_variables_the_originals_values_hold() -> None:
    found = BenchmarkDocker.read({})
    assert found.overrides() == {}
    evaluate = loaded({}).evaluate
    assert (evaluate.docker.memory, evaluate.docker.shm_size, evaluate.docker.gpus) == ("32g", "8g", "all")
    assert evaluate.timeout_s == 3600
    assert (found.mount_path, found.default_entry) == ("/workspace/", ["bash", "/app/eval_entrypoint.sh"])
    assert (found.build_from_dockerfile, found.enable_cache, found.save_logs_to_file) == (True, False, True)
    assert found.terminal_tail_lines == 50


def test_the_environment_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(
        "# of the original\nFT_BASE_MODEL='from file'\nexport FT_BENCHMARK_DATASETS=gsm8k,mmlu  # two\nALONE\n"
    )
    monkeypatch.setenv("FT_BASE_MODEL", "from the environment")
    monkeypatch.delenv("FT_BENCHMARK_DATASETS", raising=False)
    found = original.environment(tmp_path)
    assert FineTune.read(found).base == "from the environment"
    assert FineTune.read(found).benchmark_datasets == ["gsm8k", "mmlu"]
    assert "ALONE" not in found
    assert found.items() >= dict(os.environ).items()


def test_without_a_file_the_environment_is_all(tmp_path: Path) -> None:
    assert original.environment(tmp_path) == dict(os.environ)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"HF_HUB_OFFLINE": "0"}, False),
        ({"HF_HUB_OFFLINE": "1"}, True),
        ({"HF_DATASETS_OFFLINE": "TRUE"}, True),
        ({"HF_DATASETS_CACHE": "/cache"}, False),
    ],
)
def test_only_its_own_variables_mean_offline(environment: dict[str, str], expected: bool) -> None:
    assert original.offline(environment) is expected
