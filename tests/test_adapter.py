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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "Output directory not found"),
        (drop("adapter_model.safetensors"), r"No adapter weight file \(\*.safetensors or \*.bin\)"),
        (drop("adapter_config.json"), "adapter_config.json not found"),
        (write("adapter_config.json", "{"), "Invalid config JSON: Expecting"),
        (write("adapter_config.json", "[]"), "Invalid config JSON: expected an object"),
        (halve, "not a whole safetensors file"),
        (poison(float("nan")), "lora_A.weight holds NaN or infinity"),
        (poison(float("inf")), "lora_A.weight holds NaN or infinity"),
        (weigh(zero=True), "the adapter does nothing: lora_B"),
        (configure(lora_alpha=0), "lora_alpha is 0; expected more than 0"),
        (configure(r="4"), "r is '4'; expected a rank of at least 1"),
        (configure(r=8), "has rank 4 in lora_A and 4 in lora_B; the config says 8"),
        (weigh(outputs=4), "maps 8 inputs to 4 outputs; in the base of .* it maps 8 to 8"),
        (rename("layers.0", "layers.7"), "has no layer model.layers.7.self_attn.q_proj"),
        (configure(target_modules=["q_proj", "v_proj"]), "no tensors for target modules v_proj"),
        (rename("lora_", "other_"), "no LoRA tensors among 2"),
        (lose_b, "has lora_A alone"),
        (configure(base_model_name_or_path="Qwen/Qwen2.5-7B-Instruct", revision="abc"),
         "made for base Qwen/Qwen2.5-7B-Instruct@abc, but the base here is gradeflow-base-0123456789ab"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_adapter_is_said_in_one_line(
    folder: Path, base_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(AdapterError, match=message) as caught:
        adapter.validate(folder, BASE, base_folder)
    assert "\n" not in str(caught.value)


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
    assert adapter.validate(folder, BASE).rank == 4
    torch.save({"code": Path("anything")}, folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="not a file of tensors"):
        adapter.validate(folder, BASE)


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


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    base = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1,
        )
    )  # fmt: skip
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))


def test_a_fresh_adapter_is_dead_and_a_moved_one_alive(model: Any) -> None:
    import torch

    probes = adapter.default_probes(64)
    with pytest.raises(AdapterError, match="changes no logit"):
        adapter.prove_alive(model, probes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
    assert adapter.prove_alive(model, probes) == adapter.logit_change(model, probes) > 1e-4
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight").fill_(torch.nan)
    with pytest.raises(AdapterError, match="not numbers"):
        adapter.prove_alive(model, probes)


def test_what_peft_saves_is_whole_and_fits_its_base(model: Any, tmp_path: Path) -> None:
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
    model.save_pretrained(tmp_path / "saved")
    plain = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value.detach().clone()
        for name, value in model.named_parameters()
        if "lora_" not in name
    }
    from safetensors.torch import save_file as save_torch

    (tmp_path / "base").mkdir()
    save_torch(plain, tmp_path / "base" / "model.safetensors")
    adapter.stamp(tmp_path / "saved", BASE)
    facts = adapter.validate(tmp_path / "saved", BASE, tmp_path / "base")
    assert (facts.rank, facts.targets, facts.tensors) == (4, ("q_proj", "v_proj"), 4)


def test_probes_stay_within_the_vocabulary_and_are_always_the_same() -> None:
    probes = adapter.default_probes(50)
    assert probes == adapter.default_probes(50)
    assert all(0 <= token < 50 for probe in probes for token in probe)
    assert len({token for probe in probes for token in probe}) > 20
