"""What would make an evaluation fail minutes later, found from files and headers: no model is loaded, torch is not.

What is known of tasks comes from outside, so that this needs neither lm-eval nor its data.
"""

import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradeflow import adapter, disk
from gradeflow.adapter import EMBEDDED, BaseIdentity, vllm
from gradeflow.errors import AdapterError, EvaluationError
from gradeflow.evaluation.plan import WORKFLOW, Backend, Plan, Subject
from gradeflow.params import Evaluate

GIB = 1 << 30
HF = ("torch", "transformers", "peft", "accelerate", "lm_eval")
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# What a worker takes beside the weights: its libraries, and what generating needs at least.
LEAST_MEMORY = {"hf": GIB, "vllm": 2 * GIB}
LEAST_DISK = GIB // 4
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "tekken.json")


class Finding(NamedTuple):
    """`bad` is needed and missing; `optional` is missing, or worth knowing, and a run can do without."""

    mark: Literal["good", "bad", "optional"]
    what: str
    said: str
    remedy: str = ""


class Gpu(NamedTuple):
    """Bytes of its memory; 0 where they cannot be told."""

    free: int
    total: int


class Tasks(NamedTuple):
    """What is known of tasks by name: whether they run generated code, what their data lack, how much they generate."""

    needs_code: Callable[[str], bool] = lambda _: False
    missing: Callable[[str], str] = lambda _: ""
    max_gen_tokens: Callable[[str], int] = lambda _: 0


def check(plan: Plan, tasks: Tasks = Tasks(), root: Path = Path()) -> list[Finding]:  # noqa: B008 - it is immutable
    """Everything that can be found before a model is loaded; .venv-vllm is looked for in `root`."""
    return [
        *([] if plan.replies else machine(plan, tasks, root)),
        *(_adapter(plan, subject) for subject in plan.subjects if subject.folder),
        *(finding for task in plan.tasks for finding in _task(plan, tasks, task)),
        *_output(plan),
    ]


def require(plan: Plan, tasks: Tasks = Tasks(), root: Path = Path()) -> list[Finding]:  # noqa: B008
    """The findings, if none is bad.

    Raises:
        EvaluationError: all that are, a line each, with what to do.
    """
    findings = check(plan, tasks, root)
    if bad := [finding for finding in findings if finding.mark == "bad"]:
        lines = [f"{one.what}: {one.said}{f' -> {one.remedy}' if one.remedy else ''}" for one in bad]
        raise EvaluationError("nothing was loaded or measured, because of\n  " + "\n  ".join(lines))
    return findings


def machine(plan: Plan, tasks: Tasks = Tasks(), root: Path = Path()) -> Iterator[Finding]:  # noqa: B008
    """What depends on base and machine alone, and not on the plan's adapters or output."""
    there = gpus()
    whole = _base(plan)
    yield whole
    folder = base_folder(plan)
    if folder is not None and whole.mark == "good":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        yield _chat_template(plan, folder)
        yield _context(plan, config, tasks)
        yield _spread(plan, config, there)
        yield _memory(plan, folder, there)
    if plan.settings.where == "local":
        yield _backend(plan, root, there)


def choose_backend(settings: Evaluate, root: Path = Path()) -> Backend:
    """`auto` resolved: vLLM where it and a GPU are, else hf. The image has vLLM."""
    if settings.backend != "auto":
        return settings.backend
    there = settings.where == "docker" or vllm.program(root).is_file()
    return "vllm" if there and gpus() else "hf"


def base_folder(plan: Plan) -> Path | None:
    """The folder with the base's files, of a hub model the one in its cache; None where it is still to be fetched."""
    if Path(plan.base).is_dir():
        return Path(plan.base)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(plan.base, revision=plan.revision or None, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def gpus() -> list[Gpu]:
    """NVIDIA's GPUs that this process may use, as nvidia-smi tells; none where it does not run."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible in {"", "-1"}:
        return []
    chosen = [f"--id={visible}"] if visible else []
    command = [program, *chosen, "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = told.stdout.splitlines() if told.returncode == 0 else []
    return [Gpu(*(_mebibytes(value) for value in line.split(","))) for line in lines if line.count(",") == 1]


def _mebibytes(told: str) -> int:
    return int(told) << 20 if told.strip().isdecimal() else 0


def _base(plan: Plan) -> Finding:
    folder = base_folder(plan)
    if folder is None:
        return _absent(plan)
    if wrong := _not_whole(folder, plan.settings):
        return Finding("bad", "base", f"{folder}: {wrong[0]}", wrong[1])
    try:
        tensors = len(adapter.base_shapes(folder))
    except AdapterError as error:
        return Finding("bad", "base", str(error))
    return Finding("good", "base", f"{folder}: {tensors} tensors")


def _absent(plan: Plan) -> Finding:
    if plan.base.count("/") != 1 or plan.base.startswith((".", "/")):
        return Finding("bad", "base", f"{plan.base}: no such folder", "name the folder or hub model in base.model")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") != "0"]
    if offline:
        said = f"{plan.base}: not in the hub's cache here, and {offline[0]} forbids fetching it"
        return Finding("bad", "base", said, f"unset {offline[0]}, or set base.model to a folder that has it")
    return Finding("optional", "base", f"{plan.base}: not in the hub's cache here; it is fetched first, unchecked")


def _not_whole(folder: Path, settings: Evaluate) -> tuple[str, str] | None:
    """What is wrong and what to do, of a base that cannot be loaded."""
    if (folder / adapter.CONFIG).is_file() and not (folder / "config.json").is_file():
        return "an adapter, not a base model", "set base.model to its base, and give this folder as an adapter"
    again = "copy the whole model again"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index = folder / "model.safetensors.index.json"
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    except FileNotFoundError:
        return "no config.json", again
    except (ValueError, KeyError) as error:
        return f"config.json or the index of its weights cannot be read: {error!r}", again
    if missing := sorted(name for name in shards if not (folder / name).is_file()):
        return f"{len(missing)} of {len(shards)} weight files are missing, such as {missing[0]}", again
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        return "its weights are pickles (*.bin)", "save the model with save_pretrained, as safetensors"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return "no tokenizer (tokenizer.json)", "save the tokenizer into the same folder with its save_pretrained"
    if config.get("auto_map") and not settings.trust_remote_code:
        return "the model brings code along (auto_map)", "read it, then set evaluate.trust_remote_code to true"
    return None


def _chat_template(plan: Plan, folder: Path) -> Finding:
    if not plan.settings.chat_template:
        return Finding("good", "chat template", "not asked for")
    if (folder / "chat_template.jinja").is_file() or _told(folder / "chat_template.json").get("chat_template"):
        return Finding("good", "chat template", "a file of its own")
    if _told(folder / "tokenizer_config.json").get("chat_template"):
        return Finding("good", "chat template", "in tokenizer_config.json")
    remedy = "set evaluate.chat_template to false, or put a chat_template.jinja there"
    return Finding("bad", "chat template", f"{folder} has none, and evaluate.chat_template asks for one", remedy)


def _told(file: Path) -> dict[str, Any]:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _context(plan: Plan, config: Mapping[str, Any], tasks: Tasks) -> Finding:
    most, wanted = _positions(config), plan.settings.max_model_len
    if most and wanted > most:
        said = f"evaluate.max_model_len is {wanted}; the model has {most} positions"
        return Finding("bad", "context", said, f"set evaluate.max_model_len to at most {most}, or to 0")
    room = wanted or most
    generated = {task: _generated(plan, tasks, task) for task in plan.tasks}
    longest = max(generated, key=lambda task: generated[task], default="")
    if room and longest and generated[longest] >= room:
        said = f"{longest} generates up to {generated[longest]} tokens; prompt and reply have {room}"
        remedy = "lower evaluate.max_gen_tokens" if longest == WORKFLOW else "leave the task out"
        return Finding("bad", "context", said, f"raise evaluate.max_model_len or take a base with more, or {remedy}")
    return Finding("good", "context", f"{room or 'any number of'} tokens")


def _generated(plan: Plan, tasks: Tasks, task: str) -> int:
    return plan.settings.max_gen_tokens if task == WORKFLOW else tasks.max_gen_tokens(task)


def _positions(config: Mapping[str, Any]) -> int:
    """0 where the configuration does not say; a scaled RoPE has more than its training had."""
    text = config.get("text_config") or config
    most = next(
        (int(text[key]) for key in ("max_position_embeddings", "n_positions", "seq_length") if text.get(key)), 0
    )
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings") or most
    return max(most, int(original * float(rope.get("factor") or 1)))


def _spread(plan: Plan, config: Mapping[str, Any], there: list[Gpu]) -> Finding:
    wanted = plan.settings.gpus
    if not there and wanted == 1:
        return Finding("optional", "GPUs", "none: the evaluation runs on the CPU")
    if wanted > len(there):
        remedy = f"set evaluate.gpus to {max(1, len(there))}, or free the others in CUDA_VISIBLE_DEVICES"
        return Finding("bad", "GPUs", f"evaluate.gpus asks for {wanted}; {len(there)} can be used here", remedy)
    heads = (config.get("text_config") or config).get("num_attention_heads")
    if plan.backend == "vllm" and heads and heads % wanted:
        fitting = ", ".join(str(count) for count in range(1, wanted) if heads % count == 0)
        said = f"{heads} attention heads cannot be spread over {wanted}"
        return Finding("bad", "GPUs", said, f"set evaluate.gpus to one of {fitting}")
    return Finding("good", "GPUs", f"{wanted} of {len(there)}")


def _memory(plan: Plan, folder: Path, there: list[Gpu]) -> Finding:
    weights = _weight_bytes(folder, plan.dtype) + sum(
        adapter.find_weights(Path(subject.folder), allow_bin=True).stat().st_size
        for subject in plan.subjects
        if subject.folder and any((Path(subject.folder) / name).is_file() for name in adapter.WEIGHTS)
    )
    spread = plan.settings.gpus
    used = there[:spread]
    if used and all(gpu.total for gpu in used):
        need, free = weights // spread + LEAST_MEMORY["hf"], min(gpu.free for gpu in used)
        if plan.backend == "vllm":
            share = plan.settings.gpu_memory
            least = min(used, key=lambda gpu: gpu.free - share * gpu.total)
            if least.free < share * least.total:
                said = f"vLLM takes {share:g} of {_gib(least.total)} of a GPU; {_gib(least.free)} are free"
                return Finding("bad", "memory", said, "end what else runs there, or lower evaluate.gpu_memory")
            free = int(share * least.total)
        where, remedy = "of a GPU", "spread it over more (evaluate.gpus), or set train.dtype to bfloat16"
    else:
        import psutil

        need, free = weights + LEAST_MEMORY[plan.backend], psutil.virtual_memory().available
        where, remedy = "here", "end what else runs, or take a smaller base or a shorter dtype (train.dtype)"
    said = f"weights of {_gib(weights)} need some {_gib(need)} {where}; {_gib(free)} are free"
    return Finding("good", "memory", said) if free >= need else Finding("bad", "memory", said, remedy)


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def _weight_bytes(folder: Path, dtype: str) -> int:
    """As they are on disk, or in another dtype when it is one that is known."""
    if (size := BYTES.get(dtype)) is None:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return size * sum(math.prod(shape) for shape in adapter.base_shapes(folder).values())


def _backend(plan: Plan, root: Path, there: list[Gpu]) -> Finding:
    if plan.backend == "hf":
        missing = [package for package in HF if find_spec(package) is None]
        if missing:
            remedy = "pip install 'gradeflow[train]' -c constraints.txt"
            return Finding("bad", "backend", f"hf: missing {', '.join(missing)}", remedy)
        return Finding("good", "backend", "hf")
    program = vllm.program(root)
    if not program.is_file():
        return Finding("bad", "backend", f"vllm: {program} is not there", "make vllm, or set evaluate.backend to hf")
    if not there and not vllm.is_cpu_build(program):
        remedy = "set evaluate.backend to hf, or make vllm here for its CPU build"
        return Finding("bad", "backend", "vllm: built for GPUs, and none can be used", remedy)
    return Finding("good", "backend", f"vllm: {program}")


def _adapter(plan: Plan, subject: Subject) -> Finding:
    folder, what = Path(subject.folder), f"adapter {subject.name}"
    base = base_folder(plan)
    whole = base is not None and any(base.glob("*.safetensors"))
    try:
        facts = adapter.validate(
            folder,
            _identity(plan),
            base if whole else None,
            backend=plan.backend,
            allow_bin=plan.settings.allow_bin,
        )
        if plan.backend == "vllm":
            adapter.max_lora_rank(facts.rank)
    except AdapterError as error:
        return Finding("bad", what, str(error))
    if subject.digest and subject.digest != facts.digest:
        said = f"{folder} has digest {facts.digest[:12]} by now; {subject.digest[:12]} was meant"
        return Finding("bad", what, said, "leave its files alone while it is evaluated, and start again")
    return Finding("good", what, f"rank {facts.rank}, {facts.tensors} tensors of {facts.dtype}")


def _identity(plan: Plan) -> BaseIdentity:
    """The base as adapters name it."""
    folder = Path(plan.base)
    if not folder.is_dir():
        return BaseIdentity(plan.base, plan.revision, plan.base_digest)
    revision = "" if folder.name.startswith(EMBEDDED) else plan.base_digest[:12]
    return BaseIdentity(folder.name, revision, plan.base_digest)


def _task(plan: Plan, tasks: Tasks, task: str) -> Iterator[Finding]:
    if task == WORKFLOW:
        return
    if tasks.needs_code(task) and not plan.settings.confirm_run_unsafe_code:
        remedy = "set evaluate.confirm_run_unsafe_code to true: the code runs in the sandbox"
        yield Finding("bad", f"task {task}", "runs code that the model writes", remedy)
    if missing := tasks.missing(task):
        remedy = "name a folder or file that has them in evaluate.data, or fetch them before going offline"
        yield Finding("bad", f"task {task}", missing, remedy)


def _output(plan: Plan) -> Iterator[Finding]:
    """Samples, and a copy of each adapter, are written there."""
    need = LEAST_DISK + sum(_size(Path(subject.folder)) for subject in plan.subjects if subject.folder)
    for what, place in (("output", plan.out), ("cache", plan.settings.cache)):
        if place:
            yield _room(what, Path(place), need)


def _room(what: str, folder: Path, need: int) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "name another folder, or make this one writable"
        return Finding("bad", what, f"{folder}: cannot be written: {disk.said(error)}", remedy)
    said = f"{folder}: {_gib(free)} free; some {_gib(need)} are needed"
    return Finding("good", what, said) if free >= need else Finding("bad", what, said, "free some space")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
