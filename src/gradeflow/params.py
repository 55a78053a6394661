"""The settings: names, types, limits and help. Values live in params.yaml and nowhere else.

The command line is made from these classes: a setting `learning_rate` of section `train` is
`--train.learning_rate 1e-5` there, `-P train.learning_rate=1e-5` for `mlflow run` and
`-S train.learning_rate=1e-5` for `dvc exp run`.
"""

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from gradeflow.errors import SettingsError

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Operator = Literal[
    "Custom",
    "AnswerGenerate",
    "CustomCodeGenerate",
    "Programmer",
    "ScEnsemble",
    "MdEnsemble",
    "Test",
    "Format",
    "Review",
    "Revise",
]


def setting(help: str, **limits: Any) -> Any:  # noqa: A002 - the word users know from `--help`
    return Field(description=help, **limits)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Source(Section):
    """A dataset. Row counts: made here. `files`: read from there. Neither: read from where its authors publish it."""

    train: Count = setting("training rows that a procedural source makes", default=0)
    validation: Count = setting("validation rows that a procedural source makes", default=0)
    test: Count = setting("test rows that a procedural source makes", default=0)
    seed: int = setting("seed of a procedural source", default=0)
    files: dict[Literal["train", "validation", "test"], Annotated[str, Field(min_length=1)]] = setting(
        "by split: a URL, a file, a folder of files, or hub:OWNER/NAME@REVISION/PATH (a path or a glob); "
        "none, and no row counts: where the dataset is published",
        default={},
    )
    sha256: dict[Literal["train", "validation", "test"], str] = setting("checksum of each file", default={})
    mirror: str = setting(
        "URL or folder with the published files under their own names, which is tried first", default=""
    )
    bad_rows: Literal["stop", "set aside"] = setting(
        "what a row that cannot be used does: `stop` the stage, or be `set aside` in NAME.bad.jsonl with its reason",
        default="stop",
    )

    @model_validator(mode="after")
    def _from_one_place(self) -> "Source":
        made = self.train + self.validation + self.test
        if (made and self.files) or (self.seed and not made):
            raise ValueError(
                "either row counts (train, validation, test) with a seed, or files, or, of a published dataset, neither"
            )
        if unknown := set(self.sha256) - set(self.files):
            raise ValueError(f"sha256 names splits without a file: {', '.join(sorted(unknown))}")
        if self.mirror and (made or self.files):
            raise ValueError("mirror holds published files, and goes with neither row counts nor files")
        return self


class Mix(Section):
    weights: dict[str, Annotated[float, Field(gt=0)]] = setting(
        "sources to mix and their relative weights within a problem type", min_length=1
    )
    type_ratios: dict[Literal["math", "code", "qa", "mixed"], Annotated[float, Field(gt=0)]] = setting(
        "share of each problem type", min_length=1
    )
    target_train_size: Positive = setting("training rows")
    target_val_size: Positive = setting("validation rows, for choosing checkpoints")
    target_test_size: Positive = setting("held-out rows, for evaluation and promotion")
    keep_small_threshold: Count = setting("training sets with fewer rows than this are kept whole")
    seed: int = setting("seed of the sampling")
    caps: dict[str, Positive] = setting("most rows of a source in each split")
    repeat: Positive = setting("most times a training row is drawn, where its type has too few")
    near_duplicates: Share = setting(
        "similarity (Jaccard, runs of 5 words) from which a later row goes; 0: only equal ones go"
    )
    decontaminate: bool = setting("training rows that share 13 words in a row with a validation or test question go")
    protect: list[str] = setting("datasets of fetch, not mixed, whose questions are kept out of training")
    parquet_rows: Positive = setting("from so many rows on, all splits together, a mix is written as Parquet too")


class Base(Section):
    model: str = setting("`embedded` (made by `gradeflow base`), a folder, or a hub id")
    revision: str = setting("commit of the hub model; required to train on one")
    folder: Path = setting("where embedded bases are kept, each under its recipe's digest")
    seed: int = setting("seed of the embedded base")
    vocabulary: Positive = setting("size of the embedded base's vocabulary", ge=512, le=8192)
    hidden_size: Positive = setting("width; each head has 32 of it", multiple_of=32, le=1024)
    layers: Positive = setting("number of layers", le=24)
    examples: Positive = setting("questions that the embedded base is taught with")
    passes: float = setting("how often it sees them", gt=0)
    batch_tokens: Positive = setting("tokens in a batch of packed sequences", ge=512)
    learning_rate: float = setting("peak learning rate", gt=0, le=1)
    measure: Positive = setting("held-out questions per kind that it is measured on")


class Model(Section):
    """A model that is asked over chat. Other sections name it by its key in `models`."""

    url: str = setting("`local` (the base, in this process) or the URL of an OpenAI-compatible server")
    model: str = setting("the model's name at that server", default="")
    api_key_env: str = setting("environment variable that holds the key; empty: no key", default="")
    api_key_file: str = setting("file that holds the key, where no variable does; empty: no key", default="")
    temperature: float = setting("sampling temperature", ge=0, le=2, default=0.0)
    top_p: float = setting("nucleus sampling", gt=0, le=1, default=1.0)
    max_tokens: Positive = setting("most tokens of a reply, its reasoning included", default=4096)
    context: Count = setting("tokens that prompt and reply may have; 0: as the server says", default=0)
    timeout_s: float = setting("seconds before a try is given up", gt=0, default=120.0)
    deadline_s: float = setting("seconds before a call is given up with all its tries", gt=0, default=600.0)
    retries: Count = setting("further tries of a call that brought no usable reply", default=3)
    concurrency: Positive = setting("most calls in flight at once; fewer where the server cannot take them", default=64)
    cache: str = setting("folder that keeps replies to equal questions; empty: none", default=".gradeflow/replies")
    no_proxy: bool = setting("ignore proxy settings of the environment", default=False)
    input_cost: float = setting("USD per million prompt tokens", ge=0, default=0.0)
    output_cost: float = setting("USD per million completion tokens", ge=0, default=0.0)

    @model_validator(mode="after")
    def _a_try_fits(self) -> "Model":
        if self.deadline_s < self.timeout_s:
            raise ValueError(
                f"deadline_s, {self.deadline_s:g}, leaves no time for a try of timeout_s, {self.timeout_s:g}"
            )
        return self


class Judge(Section):
    models: list[str] = setting("names in `models`; each is asked, and most votes decide", min_length=1)
    votes: Positive = setting("replies of each model; those after the first are sampled")
    temperature: float = setting("sampling temperature of the first reply", ge=0, le=2)
    structured: bool = setting("verdicts as JSON by a schema, where the server can")
    prompts: dict[str, str] = setting("file with a prompt of its own, NAME.txt, by source")
    longest_answer: Positive = setting("characters; a longer answer is wrong without being read")
    audit_share: Share = setting("share of verified answers that it is shown too, to be checked; never their score")
    max_false_positives: Share = setting("share of wrong answers called right above which training stops")


class Sandbox(Section):
    isolation: Literal["auto", "bubblewrap", "landlock", "none"] = setting(
        "`auto` takes the first that passes its self-test, or refuses; `none` runs model-written code unprotected"
    )
    wall_s: float = setting("seconds for one run", gt=0)
    cpu_s: Positive = setting("CPU seconds for one run")
    memory_mb: Positive = setting("address space of one process", ge=64)
    processes: Positive = setting("processes at once")
    disk_mb: Positive = setting("size of the working folder and of one file")
    output_kb: Positive = setting("captured output; more is cut")
    parallel: Positive = setting("runs at once")


class Scorer(Section):
    number_tolerance: float = setting("relative tolerance between numbers; 0 compares as GSM8K does", ge=0, lt=1)
    tests_wall_s: float = setting("seconds for one row's unit tests", gt=0)
    judge: Literal["text", "always", "never"] = setting(
        "what the judge decides: free text, all answers in place of verifiers, or nothing (free text by token F1)"
    )


class Workflow(Section):
    executor: str = setting("name in `models` of the one that operators ask")
    operators: list[Operator] = setting("operators that a policy is told of and may call", min_length=1)
    wall_s: float = setting("seconds for one workflow, its operators included", gt=0)
    max_calls: Positive = setting("operator calls in one workflow")
    max_tokens: Count = setting("executor tokens in one workflow, read and written; 0: no limit")
    max_cost: float = setting("USD that one workflow may cost at the executor; 0: no limit", ge=0)


class Lora(Section):
    rank: Positive = setting("rank", le=512)
    alpha: float = setting("scale is alpha / rank", gt=0)
    dropout: float = setting("dropout on the adapter's input", ge=0, lt=1)
    target_modules: list[str] = setting("linear layers that get an adapter", min_length=1)


class Guard(Section):
    """Goes back to the last healthy adapter when the policy has collapsed."""

    enabled: bool = setting("watch for a collapse")
    window: Positive = setting("steps over which figures are averaged, and for which an adapter must prove healthy")
    patience: Positive = setting("steps in a row that a collapse must last")
    reward_drop: float = setting("share of the best mean reward that a collapse costs at least", gt=0, le=1)
    learning_rate_factor: float = setting("what the learning rate is multiplied by at each return", gt=0, le=1)
    max_rollbacks: Count = setting("returns to a healthy adapter before training stops with an error")


class Rollouts(Section):
    """Who writes the rollouts of training."""

    url: str = setting(
        "`local` (the trainer's own model, in this process), `vllm` (a server started for the run), or the URL, which "
        "ends in /v1, of a running vLLM",
        pattern=r"^(local|vllm|https?://.+/v1)$",
    )
    folder: str = setting("folder that this machine and the server at the URL both see; empty: the run's own")
    api_key_env: str = setting("environment variable with the key of the server at the URL; empty: no key")
    concurrency: Positive = setting("completions asked for at once")
    patience_s: float = setting("seconds that a server may be busy or away before the run stops, to be resumed", gt=0)
    gpu_memory: float = setting("share of a GPU's memory that a vLLM started for the run takes", gt=0, lt=1)


class Tasks(Section):
    """Modeling tasks to train on: those of `solve.benchmark`, in part kept for validation."""

    split: str = setting("a split by its name, such as engineering_mini; empty: drawn by val_ratio and train.seed")
    limit: Count = setting("most tasks, before they are split; 0: all")
    val_ratio: float = setting("share of the tasks that validate", gt=0, lt=1)
    min_train: Positive = setting("least tasks to train on, where there are as many")
    workspaces: str = setting("folder that keeps the workspaces of rollouts; empty: none is kept")


class Train(Section):
    environment: Literal["workflow", "modeling"] = setting("what the policy does: write workflows, or solve tasks")
    max_steps: Positive = setting("optimizer steps, where epochs is 0")
    epochs: Count = setting("passes over the training questions; 0: max_steps decides")
    seed: int = setting("seed of sampling, initialisation and order")
    prompts_per_step: Positive = setting("questions per step")
    group_size: Positive = setting("rollouts per question", ge=2)
    temperature: float = setting("sampling temperature of the policy", gt=0, le=2)
    temperature_end: float = setting("temperature reached at temperature_steps", gt=0, le=2)
    temperature_steps: Count = setting("steps from temperature to temperature_end; 0 keeps it constant")
    top_p: float = setting("nucleus sampling of the policy", gt=0, le=1)
    top_k: Count = setting("top-k sampling of the policy; 0: off")
    max_prompt_tokens: Positive = setting("longest prompt; longer ones are refused")
    max_completion_tokens: Positive = setting("longest workflow")
    learning_rate: float = setting("peak learning rate", gt=0, le=1)
    warmup_steps: Count = setting("steps of linear warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = setting("learning rate from warm-up to the last step")
    weight_decay: float = setting("weight decay", ge=0)
    max_grad_norm: float = setting("gradient clipping", gt=0)
    micro_batch: Positive = setting("rollouts in one forward pass; the rest is accumulated")
    kl_coef: float = setting("weight of the KL to the base (adapter off); 0: off", ge=0)
    clip_range: float = setting("PPO clip range below 1", gt=0, lt=1)
    clip_range_high: float = setting("PPO clip range above 1", gt=0, lt=1)
    ppo_epochs: Positive = setting("updates per batch of rollouts")
    staleness: Count = setting(
        "batches that rollouts may be behind the policy, so that scores are waited for while others are written; "
        "0: strictly on policy",
        le=64,
    )
    scale_rewards: Literal["group", "batch", "none"] = setting("what advantages are divided by: a std, or nothing")
    eval_every: Positive = setting("steps between validations, each with a checkpoint")
    val_samples: Positive = setting("validation questions")
    fault_retries: Count = setting("further tries of a rollout that a fault left without a score")
    max_replaced_groups: Count = setting(
        "groups without two different scores in a step that those of other questions may stand in for"
    )
    max_fault_share: Share = setting("share of unscored rollouts in a step above which the run stops, to be resumed")
    log_rollouts: Count = setting("rollouts logged as a table, per validation")
    trace_rollouts: Count = setting("rollouts logged as a trace, per validation")
    dtype: Literal["float32", "bfloat16"] = setting("precision of the policy's weights")
    gradient_checkpointing: bool = setting("less memory for more time")
    guard: Guard
    rollouts: Rollouts
    tasks: Tasks
    lora: Lora

    @model_validator(mode="after")
    def _checkpoints_lie_between_batches(self) -> "Train":
        if self.eval_every % self.ppo_epochs:
            raise ValueError(
                f"eval_every is {self.eval_every}, not a multiple of ppo_epochs = {self.ppo_epochs}: a checkpoint "
                "between two updates on the same rollouts could not be gone on from"
            )
        return self


class Docker(Section):
    """What `docker run` is told where an evaluation runs in its image."""

    image: str = setting("image that docker/evaluate.Dockerfile builds", min_length=1)
    memory: str = setting("most memory, as Docker writes it", pattern=r"^[0-9]+[bkmg]?$")
    shm_size: str = setting("shared memory, which several GPUs need", pattern=r"^[0-9]+[bkmg]?$")
    gpus: str = setting("`all`, a count, `device=0,1`, or empty for none")


class Evaluate(Section):
    tasks: list[str] = setting(
        "names of lm-eval tasks and groups, YAML files of tasks, and `workflow`, the project's own", min_length=1
    )
    split: Literal["validation", "test"] = setting("which mixed split the workflow task reads")
    limit: Count = setting("questions per task; 0: all")
    num_fewshot: int = setting("examples before each question; -1: as many as the task says", ge=-1)
    chat_template: bool = setting("put prompts into the model's chat template")
    batch_size: Count = setting("prompts generated at once; 0: as many as fit")
    max_gen_tokens: Positive = setting("longest generated workflow; lm-eval's tasks have their own")
    max_model_len: Count = setting("tokens that prompt and reply may have; 0: as many as the model has")
    backend: Literal["auto", "vllm", "hf"] = setting("`auto`: vLLM where a GPU and .venv-vllm are, else hf")
    gpus: Positive = setting("GPUs that one model is spread over")
    gpu_memory: float = setting("share of a GPU's memory that vLLM takes", gt=0, lt=1)
    timeout_s: Count = setting("seconds after which an evaluation ends with what it has (status 124); 0: never")
    where: Literal["local", "docker"] = setting("on this machine, or in the image")
    confirm_run_unsafe_code: bool = setting("allow tasks that run generated code; it runs in the sandbox")
    trust_remote_code: bool = setting("run code that a model or dataset brings along")
    allow_bin: bool = setting("read an adapter_model.bin (of tensors alone) where there are no safetensors")
    include: list[str] = setting("folders with YAML files of tasks of one's own")
    data: dict[str, str] = setting("folder or file that stands for a dataset of lm-eval, such as openai/gsm8k")
    cache: str = setting("folder that keeps replies, so that none is generated twice; empty: none are kept")
    after_training: bool = setting("evaluate each adapter when its training ends")
    docker: Docker


class Promote(Section):
    model: str = setting("name in the registry", pattern=r"^[A-Za-z0-9._-]+$")
    targets: list[str] = setting("tasks on one of which a challenger must gain", min_length=1)
    guards: dict[str, Share] = setting("further tasks, and how much of the score a challenger may lose there")
    margin: Share = setting("how much a challenger may lose on a target while it gains on another")
    alpha: float = setting("significance level of the one-sided paired test", gt=0, lt=1)
    power: float = setting("probability of showing the gain that is called detectable", gt=0, lt=1)
    minimum_effect: Share = setting("smallest gain in mean score that counts")
    minimum_n: Positive = setting("fewest questions for a decision on a task")
    looks: int = setting("looks at an evaluation, after each of which it may stop; 1: it never does", ge=1, le=50)
    max_fault_share: Share = setting("share of unscored samples above which nothing is decided")
    clean_data: bool = setting("whether held-out questions must have been kept out of the training data")

    @model_validator(mode="after")
    def _only_workflows_are_looked_at(self) -> "Promote":
        if self.looks > 1 and self.targets != ["workflow"]:
            raise ValueError(
                "looks is more than 1, and lm-eval asks the questions of a task at once: leave `workflow` alone in "
                "targets (other tasks can be guards), or set looks to 1"
            )
        return self


class Serve(Section):
    models: list[str] = setting(
        "registered adapters of one base: `NAME@ALIAS`, which is followed, or `NAME/VERSION`", min_length=1
    )
    backend: Literal["auto", "vllm", "transformers"] = setting("`auto`: vLLM where .venv-vllm has it, else in process")
    host: str = setting("address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = setting("port; 0: any free one")
    api_key_env: str = setting("environment variable with the key that clients must send; needed off loopback")
    max_tokens: Positive = setting("most tokens of a reply")
    max_request_kib: Positive = setting("most KiB of a request")
    max_concurrency: Positive = setting("most requests at once; more are told to ask again")
    poll_s: Annotated[float, Field(gt=0)] = setting("seconds between looks at the registry for aliases that moved")
    trace_share: Share = setting("share of the requests that are kept in MLflow as traces")
    vllm_args: list[str] = setting("further arguments of `vllm serve`")


class Solve(Section):
    model: str = setting("name in `models` of the one that the agent asks")
    workflow: Literal["scientific"] = setting("the agent's way of working")
    benchmark: str = setting("benchmark family: engineering, mathmodeling, mle or science")
    task: str = setting("competition ids, by commas; empty: all of the benchmark")
    data_dir: str = setting("folder of competitions; empty: the built-in tasks")
    tasks_dir: str = setting("folder with their config.yaml and grade.py; empty: looked for beside the data")
    quarantine: str = setting("file of tasks to skip, which `gradeflow audit tasks` writes; empty: none is skipped")
    log_path: Path = setting("where results and workspaces go")
    max_turns: Positive = setting("experiments before the conclusion")
    seeds: Positive = setting("how often each task is solved, for the standard error of the medal rate")
    parallel: Positive = setting("tasks at once")
    review: bool = setting("whether the model reviews each experiment, and ends the work when it is done")
    sandbox_timeout_s: float = setting("seconds for one experiment", gt=0)
    memory_mb: Positive = setting("memory of one experiment", ge=64)


class Grade(Section):
    wall_s: float = setting("seconds for one grading by a competition's own grader", gt=0)
    prepare_s: float = setting("seconds for a competition's own preparer", gt=0)
    memory_mb: Positive = setting("memory of a grader or preparer", ge=64)
    disk_mb: Positive = setting("what a grader or preparer may write")


class Tracking(Section):
    uri: str = setting("MLflow server or store; empty: MLFLOW_TRACKING_URI, else sqlite in this folder")
    experiment: str = setting("experiment of all runs", min_length=1)


class Params(Section):
    """Everything in params.yaml, section by section."""

    fetch: dict[str, Source]
    mix: Mix
    base: Base
    models: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], Model]
    sandbox: Sandbox
    workflow: Workflow
    judge: Judge
    scorer: Scorer
    train: Train
    evaluate: Evaluate
    promote: Promote
    serve: Serve
    solve: Solve
    grade: Grade
    tracking: Tracking

    @model_validator(mode="after")
    def _sources_are_known(self) -> "Params":
        for name in ("weights", "protect"):
            if missing := sorted(set(getattr(self.mix, name)) - set(self.fetch)):
                raise ValueError(f"mix.{name} names sources that fetch lacks: {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _models_are_known(self) -> "Params":
        roles = {"workflow.executor": [self.workflow.executor], "judge.models": self.judge.models}
        for role, names in (roles | {"solve.model": [self.solve.model]}).items():
            if missing := [name for name in names if name not in self.models]:
                raise ValueError(f"{role} names {', '.join(missing)}; models has {', '.join(self.models)}")
        return self


def load(path: Path = Path("params.yaml"), overrides: Mapping[str, str] | None = None) -> Params:
    """Read params.yaml and lay `overrides` (dotted name -> text as typed) over it.

    Raises:
        SettingsError: naming the key, what it holds and what was expected.
    """
    import ruamel.yaml
    from ruamel.yaml.error import YAMLError

    reader = ruamel.yaml.YAML(typ="safe", pure=True)
    try:
        tree = reader.load(_text(path))
    except YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        said = " ".join(str(getattr(error, "problem", None) or error).split())
        raise SettingsError(f"{path}{line}: not valid YAML: {said}") from None
    except RecursionError:
        raise SettingsError(f"{path}: not valid YAML: nested too deeply") from None
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else type(tree).__name__
        raise SettingsError(f"{path}: expected a mapping of sections ({', '.join(Params.model_fields)}), found {found}")
    for name, text in (overrides or {}).items():
        try:
            value = reader.load(text) if text else ""
        except YAMLError:
            value = text
        _put(
            tree,
            name.split("."),
            text if isinstance(_leaf_type(name), type) and _leaf_type(name) is str else value,
        )
    return validate(tree, origin=str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: no such file. Run in the project's folder, or name the file with --params"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def validate(tree: Mapping[str, Any], origin: str = "params") -> Params:
    try:
        return Params.model_validate(tree)
    except ValidationError as error:
        problems = error.errors()
        misspelt = {_meant(_keys(problem)) for problem in problems if problem["type"] == "extra_forbidden"}
        told = [problem for problem in problems if problem["type"] != "missing" or _name(problem) not in misspelt]
        raise SettingsError("\n".join(_explain(problem, origin) for problem in told)) from None


def settings(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Each setting below `section` with its dotted name, nested sections included."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from settings(info.annotation, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", info


def section(name: str) -> type[BaseModel]:
    """The class of a top-level section or, for `fetch` and `models`, of each of the entries by name."""
    annotation: Any = Params.model_fields[name].annotation
    found: type[BaseModel] = typing.get_args(annotation)[1] if is_map(name) else annotation
    return found


def is_map(name: str) -> bool:
    """Whether a top-level section has entries by name: datasets, models."""
    return typing.get_origin(Params.model_fields[name].annotation) is dict


def _leaf_type(dotted: str) -> Any:
    """The annotation behind a dotted name, through sections and named maps; None where there is none."""
    annotation: Any = Params
    for part in dotted.split("."):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            info = annotation.model_fields.get(part)
            if info is None:
                return None
            annotation = info.annotation
        elif typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
        else:
            return None
    return annotation


def _put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    *parents, last = keys
    for key in parents:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise SettingsError(f"{'.'.join(keys)}: {key} is a value, not a section")
        tree = child
    tree[last] = value


def _explain(problem: Any, origin: str) -> str:
    name = _name(problem)
    match problem["type"]:
        case "extra_forbidden":
            keys = _keys(problem)
            meant = _meant(keys)
            hint = f"did you mean {meant}?" if meant else f"known here: {', '.join(_siblings(keys[:-1]))}"
            return f"{origin}: {name}: no such setting; {hint}"
        case "missing":
            return f"{origin}: {name}: missing, and every setting must be there"
        case "invalid_key":
            return f"{origin}: {problem['input']} is a name; expected text there, in quotes if it must look like this"
        case "model_type":
            return f"{origin}: {name} is {problem['input']!r}; expected a section with settings"
        case "value_error":
            said = problem["msg"].removeprefix("Value error, ")
            return f"{origin}: {name}: {said}" if name else f"{origin}: {said}"
        case _:
            expected = problem["msg"].removeprefix("Input ").removeprefix("should be ")
            return f"{origin}: {name} is {problem['input']!r}; expected {expected}"


def _keys(problem: Any) -> list[str]:
    return [str(part) for part in problem["loc"] if part != "[key]"]


def _name(problem: Any) -> str:
    return ".".join(_keys(problem))


def _meant(keys: Sequence[str]) -> str:
    """The setting that an unknown one is probably a misspelling of; empty where none is like it."""
    *parents, last = keys
    near = difflib.get_close_matches(last, _siblings(parents), n=1)
    return ".".join([*parents, *near]) if near else ""


def _siblings(parents: Sequence[str]) -> list[str]:
    annotation = _leaf_type(".".join(parents)) if parents else Params
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(annotation.model_fields)
    return []


def type_name(annotation: Any) -> str:
    """How `--help` names a type: `float`, `a | b` for choices, `list`, `map`."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if origin is Annotated:
        return type_name(typing.get_args(annotation)[0])
    if origin in {dict, list}:
        return "map" if origin is dict else "list"
    if origin is types.UnionType:
        return " | ".join(type_name(part) for part in typing.get_args(annotation))
    name = str(annotation.__name__)
    return {"Path": "path", "str": "text", "bool": "true | false"}.get(name, name)
