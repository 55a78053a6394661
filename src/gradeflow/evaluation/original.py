"""The settings of the original: its container's variables, FT_ and BENCHMARK_DOCKER_, from the environment and .env.

The same names and defaults, but: lists may be JSON or have commas, an empty variable is one that is not set, nothing
overrules NUM_GPUS, and LIMIT is a whole number. A missing adapter is an error, as it was, even where its path is only
the default: the base's score must not pass for an adapter's, so the base alone is measured when ADAPTER_PATH is `none`.
Generated code needs HF_ALLOW_CODE_EVAL=1, as in lm-eval; a model's own code runs only if params.yaml allows it.
"""

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gradeflow.errors import SettingsError
from gradeflow.params import Count, Positive

NO_ADAPTER = "none"
CONTEXT = 4096
"""Most tokens that prompt and reply have in the original."""


def environment(folder: Path) -> dict[str, str]:
    """The process's environment, and below it what `folder`/.env says."""
    from dotenv import dotenv_values

    file = {name: text for name, text in dotenv_values(folder / ".env").items() if text is not None}
    return file | dict(os.environ)


def offline(environment: Mapping[str, str]) -> bool:
    """Whether the environment keeps Hugging Face's libraries from the hub."""
    said = (environment.get(name, "").lower() for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    return any(value in {"1", "on", "yes", "true"} for value in said)


def _names(text: str) -> list[str]:
    if text.lstrip().startswith("["):
        names = json.loads(text)
        if not all(isinstance(name, str) for name in names):
            raise ValueError
    else:
        names = text.split(",")
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))


def _batch(text: str) -> str:
    """lm-eval's `auto` and `auto:N` are 0 here."""
    return "0" if text.partition(":")[0] == "auto" else text


def _words(text: str) -> list[str]:
    return shlex.split(text)


Names = Annotated[list[str], BeforeValidator(_names), Field(min_length=1)]
Size = Annotated[str, Field(pattern=r"^[0-9]+[bkmg]?$")]


class Variables(BaseModel):
    """A field is the variable of its name in capitals, behind `prefix`; its description says what is expected there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prefix: ClassVar[str] = ""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """What these variables say, and the defaults of those that say nothing.

        Raises:
            SettingsError: naming each variable that is wrong, what it holds and what was expected.
        """
        given = {name: environment.get(cls.prefix + name.upper(), "") for name in cls.model_fields}
        try:
            return cls.model_validate({name: text for name, text in given.items() if text.strip()})
        except ValidationError as error:
            wrong = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors())
            raise SettingsError("\n".join(cls._explain(name, given[name]) for name in wrong)) from None

    @classmethod
    def _explain(cls, name: str, text: str) -> str:
        found = f"is {text!r}" if text.strip() else "is not set"
        return f"{cls.prefix}{name.upper()} {found}; expected {cls.model_fields[name].description}"


def variable(expected: str, default: Any = ...) -> Any:
    return Field(default, description=expected)


class Container(Variables):
    """What docker/evaluate-entrypoint.sh is told."""

    benchmark_tasks: Names = variable("names of tasks, with commas between them or as a JSON list", ["gsm8k"])
    base_model: str = variable("the base model: a folder, or a hub id")
    adapter_path: str = variable(f"an adapter's folder, or {NO_ADAPTER}", "/workspace/output")
    output_dir: Path = variable("a folder for results", Path("/workspace/benchmark_results"))
    limit: Positive | None = variable("a number of questions per task, or nothing for all", None)
    batch_size: Annotated[Count, BeforeValidator(_batch)] = variable("auto, or a number of prompts", 0)
    num_gpus: Positive = variable("a number of GPUs", 1)
    hf_datasets_cache: Path = variable("the folder with prepared datasets", Path("/workspace/benchmarks"))
    hf_allow_code_eval: bool = variable("1, or nothing", False)  # noqa: FBT003 - a default

    def overrides(self) -> dict[str, str]:
        """As `params.load` takes them."""
        found = {
            "base.model": self.base_model,
            "evaluate.tasks": _yaml(self.benchmark_tasks),
            "evaluate.limit": str(self.limit or 0),
            "evaluate.batch_size": str(self.batch_size),
            "evaluate.gpus": str(self.num_gpus),
        }
        return found | ({"evaluate.confirm_run_unsafe_code": "true"} if self.hf_allow_code_eval else {})


class FineTune(Variables):
    """What the original's evaluator is told. `file_path` holds models/BASE, datasets/DATASET and benchmarks."""

    prefix = "FT_"

    benchmark_datasets: Names = variable("names of tasks, with commas between them or as a JSON list", ["mmlu"])
    benchmark_timeout: Count | None = variable("a whole number of seconds, 0 for no limit", None)
    file_path: Path | None = variable("a folder with models, datasets and benchmarks", None)
    base_model: str = variable("the base model: a name in FT_FILE_PATH/models, a folder, or a hub id")
    dataset: str = variable("a name in FT_FILE_PATH/datasets", "")

    @property
    def base(self) -> str:
        """The folder in FT_FILE_PATH/models where there is one, else as it is written."""
        kept = self.file_path / "models" / self.base_model if self.file_path else None
        return str(kept) if kept and kept.is_dir() else self.base_model

    @property
    def benchmarks(self) -> Path | None:
        """What HF_DATASETS_CACHE is to be."""
        return self.file_path / "benchmarks" if self.file_path else None

    @property
    def dataset_folder(self) -> Path | None:
        return self.file_path / "datasets" / self.dataset if self.file_path and self.dataset else None

    def overrides(self) -> dict[str, str]:
        """As `params.load` takes them; a time that is not set is left to BENCHMARK_DOCKER_ and params.yaml."""
        found = {"base.model": self.base, "evaluate.tasks": _yaml(self.benchmark_datasets)}
        if self.benchmark_timeout is not None:
            found["evaluate.timeout_s"] = str(self.benchmark_timeout)
        return found


class BenchmarkDocker(Variables):
    """What the original tells Docker; where None, params.yaml says it, with the original's values.

    The image too: the original's, rdagent-lm-eval:latest, is only built over or used where it is named. `enable_cache`
    is read and changes nothing: what is done is done, for the same base, adapter, task and settings.
    """

    prefix = "BENCHMARK_DOCKER_"

    build_from_dockerfile: bool = variable("true or false", True)  # noqa: FBT003 - a default
    image: str | None = variable("an image", None)
    mount_path: Annotated[str, Field(pattern="^/.")] = variable("an absolute path in the container", "/workspace/")
    default_entry: Annotated[list[str], BeforeValidator(_words), Field(min_length=1)] = variable(
        "a command with its arguments", ["bash", "/app/eval_entrypoint.sh"]
    )
    running_timeout_period: Count | None = variable("a whole number of seconds, 0 for no limit", None)
    mem_limit: Size | None = variable("memory as Docker writes it, such as 32g", None)
    shm_size: Size | None = variable("memory as Docker writes it, such as 8g", None)
    enable_gpu: bool = variable("true or false", True)  # noqa: FBT003 - a default
    enable_cache: bool = variable("true or false", False)  # noqa: FBT003 - a default
    save_logs_to_file: bool = variable("true or false", True)  # noqa: FBT003 - a default
    terminal_tail_lines: Count = variable("a number of lines", 50)

    def overrides(self) -> dict[str, str]:
        """As `params.load` takes them: only what is set."""
        found = {
            "evaluate.timeout_s": self.running_timeout_period,
            "evaluate.docker.image": self.image,
            "evaluate.docker.memory": self.mem_limit,
            "evaluate.docker.shm_size": self.shm_size,
            "evaluate.docker.gpus": None if self.enable_gpu else "",
        }
        return {name: str(value) for name, value in found.items() if value is not None}


def _yaml(names: list[str]) -> str:
    """JSON is YAML: a name stays one name, whatever it holds."""
    return json.dumps(names, ensure_ascii=False)
