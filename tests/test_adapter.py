import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gradeflow import adapter
from gradeflow.adapter import BaseIdentity
from gradeflow.errors import AdapterError

BASE = BaseIdentity("gradeflow-base-0123456789ab", "", "0123456789ab" + "0" * 52)
LAYER = "model.layers.0.self_attn.q_proj"


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / adapter.CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def config(**changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "inference_mode": True,
        "base_model_name_or_path": f"/home/someone/models/{BASE.name}",
        "revision": None,
        "peft_version": "0.21.2",
    } | changes


def tensors(rank: int = 4, outputs: int = 8, *, zero: bool = False) -> dict[str, Any]:
    random = np.random.default_rng(0)
    b = random.normal(size=(outputs, rank)).astype(np.float32)
    return {
        f"base_model.model.{LAYER}.lora_A.weight": random.normal(size=(rank, 8)).astype(np.float32),
        f"base_model.model.{LAYER}.lora_B.weight": np.zeros_like(b) if zero else b,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "adapter", config(), tensors())


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    base.mkdir()
    save_file({f"{LAYER}.weight": np.zeros((8, 8), np.float32)}, base / "model.safetensors")
    return base


def test_a_whole_adapter_has_its_facts_told(folder: Path, base_folder: Path) -> None:
    facts = adapter.validate(folder, BASE, base_folder)
    assert (facts.rank, facts.alpha, facts.targets, facts.tensors) == (4, 8.0, ("q_proj",), 2)
    assert facts.dtype == "float32"
    assert facts.digest == adapter.digest(folder)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def configure(**changes: Any) -> Callable[[Path], None]:
    return write(adapter.CONFIG, json.dumps(config(**changes)))


def weigh(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: save_file(tensors(**changes), folder / "adapter_model.safetensors")


def poison(value: float) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        spoilt = tensors()
        spoilt[f"base_model.model.{LAYER}.lora_A.weight"][1, 2] = value
        save_file(spoilt, folder / "adapter_model.safetensors")

    return spoil


def halve(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def rename(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file({name.replace(old, new): values for name, values in load_file(file).items()}, file)

    return change


def lose_b(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: values for name, values in load_file(file).items() if "lora_A" in name}, file)


def resave(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    return apply


def only_bin(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def merged(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def into_checkpoint(folder: Path) -> None:
    (folder / "checkpoint-40").mkdir()
    for file in (adapter.CONFIG, "adapter_model.safetensors"):
        (folder / file).rename(folder / "checkpoint-40" / file)


def shard(folder: Path) -> None:
    resave(lambda found: {name: values[:0] for name, values in found.items()})(folder)


def mixed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: values.astype(np.float16) if "lora_A" in name else values for name, values in found.items()}


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {name: values.astype(np.int8) for name, values in found.items()}


def with_magnitude(found: dict[str, Any]) -> dict[str, Any]:
    return found | {f"base_model.model.{LAYER}.lora_magnitude_vector": np.ones(8, np.float32)}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

BROKEN: list[tuple[str, Callable[[Path], None], str]] = [
    # the original's four, word for word
    ("no folder", shutil.rmtree, "Output directory not found"),
    ("no weights", drop("adapter_model.safetensors"), r"No adapter weight file \(\*\.safetensors or \*\.bin\)"),
    ("no config", drop("adapter_config.json"), "adapter_config.json not found.* save_pretrained"),
    ("half a config", write("adapter_config.json", "{"), "Invalid config JSON: Expecting"),
    ("a list for a config", write("adapter_config.json", "[]"), "Invalid config JSON: expected an object"),
    # the file of weights
    ("a pickle alone", only_bin, "adapter_model.bin: a pickle.*evaluate.allow_bin"),
    ("a merged model", merged, "is a whole model: give it as base.model"),
    ("a trainer's folder", into_checkpoint, "adapters below: checkpoint-40; name one"),
    ("half a file", halve, "not a whole safetensors file.*again"),
    ("a pointer", write("adapter_model.safetensors", POINTER), "git lfs pull"),
    ("no tensors", resave(lambda _: {}), "holds no tensors"),
    # the configuration
    ("IA3", configure(peft_type="IA3"), "peft_type is IA3; expected LORA"),
    ("prompt tuning", configure(peft_type="PROMPT_TUNING"), "peft_type is PROMPT_TUNING; expected LORA"),
    ("no type", configure(peft_type=None), "peft_type is missing"),
    ("experts", configure(target_parameters=["mlp.experts.w"]), "LoRA with target_parameters cannot be checked"),
    ("PiSSA", configure(init_lora_weights="pissa_niter_4"), "is pissa_niter_4, which changes the base.* as plain LoRA"),
    ("alpha 0", configure(lora_alpha=0), "lora_alpha is 0; expected more than 0"),
    ("a rank that is text", configure(r="4"), "r is '4'; expected a rank of at least 1"),
    ("a pattern that is a list", configure(rank_pattern=[4]), "rank_pattern is .*; expected a number by pattern"),
    ("no targets", configure(target_modules=None), "target_modules is None; expected the names"),
    # the tensors
    ("another rank", configure(r=8), "has rank 4 in lora_A and 4 in lora_B; the config says 8"),
    ("shards", shard, r"lora_A has the shape \(0, 8\), which is no matrix: shards.*Gather"),
    ("two dtypes", resave(mixed), "LoRA tensors are float16 and float32. Save them in one dtype"),
    ("integers", resave(rounded), "is I8; expected one of float64"),
    ("NaN", poison(float("nan")), "lora_A.weight holds NaN or infinity.*earlier checkpoint"),
    ("infinity", poison(float("inf")), "lora_A.weight holds NaN or infinity"),
    ("zero", weigh(zero=True), "the adapter does nothing: lora_B"),
    ("one half", lose_b, "has lora_A alone"),
    ("other names", rename("lora_", "other_"), "no LoRA tensors among 2.*found base_model"),
    ("names without PEFT's prefix", rename("base_model.model.", ""), "binds to no module"),
    ("an adapter's name in between", rename("lora_A.", "lora_A.default."), "would be left out"),
    ("a module missing", configure(target_modules=["q_proj", "v_proj"]), "no tensors for target modules v_proj"),
    ("a saved module missing", configure(modules_to_save=["lm_head"]), "no tensors for lm_head of modules_to_save"),
    ("DoRA undeclared", resave(with_magnitude), "Set use_dora to true"),
    ("DoRA without its vectors", configure(use_dora=True), "has no lora_magnitude_vector"),
    # the base
    ("no base named", configure(base_model_name_or_path=None), "base_model_name_or_path is missing.*write that there"),
    ("another base", configure(base_model_name_or_path="Qwen/Qwen2.5-7B-Instruct", revision="abc"),
     "made for base Qwen/Qwen2.5-7B-Instruct@abc, but the base here is gradeflow-base-0123456789ab"),
    ("another revision", configure(base_model_name_or_path=BASE.name, revision="abc"), "made for base .*@abc"),
    ("another width", weigh(outputs=4), "maps 8 inputs to 4 outputs; in the base of .* it maps 8 to 8"),
    ("a layer too many", rename("layers.0", "layers.7"), "has no layer model.layers.7.self_attn.q_proj"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), [pytest.param(*case[1:], id=case[0]) for case in BROKEN])
def test_what_is_wrong_with_an_adapter_is_said_in_one_line(
    folder: Path, base_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(AdapterError, match=message) as caught:
        adapter.validate(folder, BASE, base_folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_an_adapter_without_some_layers_is_half_of_one_unless_it_says_so(folder: Path, base_folder: Path) -> None:
    layers = {f"model.layers.{number}.self_attn.q_proj.weight": np.zeros((8, 8), np.float32) for number in (0, 1)}
    tower = {f"vision.layers.{number}.self_attn.q_proj.weight": np.zeros((4, 4), np.float32) for number in (0, 1)}
    save_file(layers | tower, base_folder / "model.safetensors")
    with pytest.raises(AdapterError, match=r"1 of the 2 modules .* have no tensors, such as model\.layers\.1"):
        adapter.validate(folder, BASE, base_folder)
    for said in ({"layers_to_transform": [0]}, {"exclude_modules": ["layers.1.self_attn.q_proj"]}):
        configure(**said)(folder)
        assert adapter.validate(folder, BASE, base_folder).tensors == 2


@pytest.mark.parametrize("written", ["Qwen/Qwen2.5-0.5B", "/models/Qwen2.5-0.5B", "Qwen2.5-0.5B"])
def test_an_adapter_that_names_no_revision_is_known_by_its_base_s_name(folder: Path, written: str) -> None:
    configure(base_model_name_or_path=written)(folder)
    for name in ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"):
        assert adapter.validate(folder, BaseIdentity(name, "abc", "")).rank == 4
    with pytest.raises(AdapterError, match=r"the base here is Qwen/Qwen2.5-7B@abc. Set base.model"):
        adapter.validate(folder, BaseIdentity("Qwen/Qwen2.5-7B", "abc", ""))


def test_a_rank_pattern_gives_a_module_its_own_rank(tmp_path: Path) -> None:
    folder = save(tmp_path / "pattern", config(r=8, rank_pattern={"q_proj": 4}), tensors())
    assert adapter.validate(folder).rank == 8


def test_a_missing_base_model_is_named_with_the_way_to_get_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"no base model here .* `gradeflow base`"):
        adapter.validate(folder, BASE, tmp_path / "nowhere")


def test_half_precision_weights_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    folder = save(tmp_path / "half", config(), tensors())
    values = {name: torch.from_numpy(array).bfloat16() for name, array in tensors().items()}
    save_torch(values, folder / "adapter_model.safetensors")
    assert adapter.validate(folder, BASE).dtype == "bfloat16"
    values = {name: value * torch.nan for name, value in values.items()}
    save_torch(values, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="NaN"):
        adapter.validate(folder, BASE)


def test_a_bin_file_is_read_as_tensors_and_never_run(tmp_path: Path) -> None:
    import torch

    folder = save(tmp_path / "bin", config(), tensors())
    (folder / "adapter_model.safetensors").unlink()
    torch.save({name: torch.from_numpy(array) for name, array in tensors().items()}, folder / "adapter_model.bin")
    assert adapter.validate(folder, BASE, allow_bin=True).rank == 4
    for other, said in (({"code": Path("anything")}, "Weights only load failed"), ({"r": 4}, "it holds other things")):
        torch.save(other, folder / "adapter_model.bin")
        with pytest.raises(AdapterError, match=f"not a file of tensors: {said}"):
            adapter.validate(folder, BASE, allow_bin=True)
    torch.save({"lora_A": torch.ones(4, 8, dtype=torch.int64)}, folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="lora_A is int64; expected one of float64"):
        adapter.validate(folder, BASE, allow_bin=True)


def test_safetensors_are_read_before_a_bin_file(folder: Path) -> None:
    (folder / "adapter_model.bin").write_bytes(b"never opened")
    assert adapter.validate(folder, BASE, allow_bin=True) == adapter.validate(folder, BASE)


@pytest.mark.parametrize(
    "changes",
    [
        {"base_model_name_or_path": f"/elsewhere/{BASE.name}"},
        {"base_model_name_or_path": BASE.name},
        {"base_model_name_or_path": f"models/{BASE.name}"},
        {"peft_version": "0.30.0"},
        {"inference_mode": False},
        {"a_later_default": None, "another": False, "a_third": {}},
    ],
)
def test_the_digest_does_not_depend_on_machine_or_version(folder: Path, changes: dict[str, Any]) -> None:
    before = adapter.digest(folder)
    configure(**changes)(folder)
    assert adapter.digest(folder) == before


def test_the_digest_does_not_depend_on_the_order_of_target_modules(folder: Path) -> None:
    configure(target_modules=["q_proj", "k_proj"])(folder)
    before = adapter.digest(folder)
    configure(target_modules=["k_proj", "q_proj"])(folder)
    assert adapter.digest(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        configure(lora_alpha=16),
        configure(use_rslora=True),
        configure(base_model_name_or_path="Qwen/Q"),
        poison(7.0),
    ],
)
def test_the_digest_tells_what_changes_the_effect(folder: Path, change: Callable[[Path], None]) -> None:
    before = adapter.digest(folder)
    change(folder)
    assert adapter.digest(folder) != before


def test_a_stamp_names_the_base_and_leaves_the_digest(folder: Path) -> None:
    before = adapter.digest(folder)
    adapter.stamp(folder, BASE)
    written = adapter.read_config(folder)
    assert (written["base_model_name_or_path"], written["revision"]) == (BASE.name, None)
    assert adapter.digest(folder) == before
    assert sorted(file.name for file in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def bare() -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=1,
            num_key_value_heads=1,
        )
    )  # fmt: skip


def adapted(**changes: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        bare(), LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | changes)
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return adapted()


def test_a_fresh_adapter_is_dead_and_a_moved_one_alive(model: Any) -> None:
    import torch

    probes = adapter.default_probes(64)
    with pytest.raises(AdapterError, match="changes no log-probability"):
        adapter.fingerprint(model, probes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
    assert max(map(abs, adapter.fingerprint(model, probes))) > 1e-4
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight").fill_(torch.nan)
    with pytest.raises(AdapterError, match="not numbers"):
        adapter.fingerprint(model, probes)


def test_what_peft_saves_is_whole_and_fits_its_base(model: Any, tmp_path: Path) -> None:
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
    model.save_pretrained(tmp_path / "saved")
    bare().save_pretrained(tmp_path / "base")
    adapter.stamp(tmp_path / "saved", BASE)
    facts = adapter.validate(tmp_path / "saved", BASE, tmp_path / "base", backend="vllm")
    assert (facts.rank, facts.targets, facts.tensors) == (4, ("q_proj", "v_proj"), 8)


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"use_rslora": True}, ""),
    ({"target_modules": "all-linear"}, ""),
    ({"layers_to_transform": [1]}, ""),
    ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}}, ""),
    ({"rank_pattern": {"q_proj": 2}}, "modules of different scale"),
    ({"alpha_pattern": {"layers.1.self_attn.v_proj": 4}}, "modules of different scale"),
    ({"use_dora": True}, "DoRA .* or train with use_dora=False"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save \\(lm_head\\)"),
    ({"modules_to_save": ["embed_tokens", "norm"]}, "modules_to_save"),
    ({"bias": "all"}, "trained biases"),
    ({"bias": "lora_only"}, "trained biases"),
    ({"lora_bias": True}, "trained biases"),
    ({"target_modules": ["q_proj", "lm_head"]}, r"LoRA on embeddings or head in full \(lm_head\)"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, r"LoRA on embeddings or head in full \(embed_tokens\)"),
    ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
]


@pytest.mark.filterwarnings("ignore")  # PEFT's advice on embeddings and biases
@pytest.mark.parametrize(("changes", "refused"), KINDS)
def test_what_peft_trains_is_valid_for_transformers_and_vllm_is_given_what_it_takes(
    changes: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    adapted(**{"init_lora_weights": False} | changes).save_pretrained(tmp_path / "saved")
    bare().save_pretrained(tmp_path / "base")
    adapter.validate(tmp_path / "saved", base_folder=tmp_path / "base")
    assert any(adapter.fingerprint(PeftModel.from_pretrained(bare(), tmp_path / "saved"), adapter.default_probes(64)))
    if refused:
        with pytest.raises(AdapterError, match=f"vLLM does not take {refused}"):
            adapter.validate(tmp_path / "saved", base_folder=tmp_path / "base", backend="vllm")
    else:
        adapter.validate(tmp_path / "saved", base_folder=tmp_path / "base", backend="vllm")


@pytest.mark.parametrize(
    ("rank", "smallest"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (65, 128), (129, 256), (257, 320), (321, 512)]
)
def test_vllm_is_given_the_smallest_rank_that_fits(rank: int, smallest: int) -> None:
    assert adapter.max_lora_rank(rank) == smallest


def test_a_rank_above_all_of_vllm_s_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"rank 513; vLLM takes at most 512\. Set evaluate.backend to hf"):
        adapter.max_lora_rank(513)


def test_a_fingerprint_tells_adapters_apart_and_not_how_they_were_computed() -> None:
    import torch

    one, probes = adapted(init_lora_weights=False), adapter.default_probes(64)
    first = adapter.fingerprint(one, probes)
    assert len(first) == len(probes) * 15
    one_by_one = tuple(value for probe in probes for value in adapter.fingerprint(one, [probe]))
    assert adapter.alike(first, one_by_one)
    more_exact = adapter.fingerprint(one.double(), probes)
    assert adapter.alike(first, more_exact)
    with torch.no_grad():
        one.get_parameter("base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight").mul_(1.2)
    assert not adapter.alike(first, adapter.fingerprint(one, probes))
    assert not adapter.alike(first, first[:-1])


def test_probes_stay_within_the_vocabulary_and_are_always_the_same() -> None:
    probes = adapter.default_probes(50)
    assert probes == adapter.default_probes(50)
    assert all(0 <= token < 50 for probe in probes for token in probe)
    assert len({token for probe in probes for token in probe}) > 20
