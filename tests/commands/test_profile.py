import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params
from gradeflow.commands import original as settings_files
from gradeflow.commands import profile
from gradeflow.commands.original import Note
from gradeflow.errors import SettingsError
from gradeflow.params import Params

ROOT = Path(__file__).parents[2]
MAX_STEPS = params.load(ROOT / "params.yaml").train.max_steps

# The key names of the original's training.yaml; values are those of its defaults.
TRAINING = """\
exp_name: aflow_grpo            # an experiment
output_dir: checkpoints
log_dir: logs
max_steps: 500
save_every: 50
eval_every: 10
val_samples: 50
log_every: 5
adv_estimator: grpo
num_return_sequences_in_group: 6
ppo_epochs: 1
async_generation_ratio: 0
use_kl_loss: true
kl_loss_coef: 0.001
clip_range: 0.2
gamma: 1.0
lambda_gae: 0.95
rollout_batch_size: 4
prompt_max_length: 3072
response_max_length: 5120
base_model: Qwen/Qwen2.5-7B-Instruct
model_dtype: bfloat16
use_lora: true
lora_rank: 64
lora_alpha: 64
lora_target_modules: "q_proj,k_proj,v_proj,o_proj"
lora_dropout: 0.05
learning_rate: 1e-5
weight_decay: 0.01
max_grad_norm: 1.0
gradient_accumulation_steps: 2
warmup_steps: 50
bf16: true
gradient_checkpointing: false
device_mapping: [0]
physical_gpus: [2]
protected_pids: []
num_gpus: 1
world_size: 1
data_dir: data
train_dataset: data/train.jsonl
val_dataset: data/val.jsonl
test_dataset: data/test.jsonl
domain_ratios: {math: 0.4, code: 0.3, qa: 0.3}
aflow_config_path: config/aflow_llm.yaml
aflow_executor_model: gpt-oss-120b
aflow_operators: [Custom, AnswerGenerate, Programmer, ScEnsemble, Test, Review, Revise, Plan]
aflow_operator_descriptions_path: operator.json
execution_timeout: 600
reward_weights: {correctness: 0.65, efficiency: 0.15, simplicity: 0.1, format: 0.05, repetition: 0.05}
experience_buffer: {enabled: true, buffer_size: 100, reward_threshold: 8.0, persistence_dir: data/buffer}
prompt_optimizer: {enabled: true, few_shot_k: 3, similarity_threshold: 0.7}
operator_prompt_enhancer: {enabled: true, top_k_examples: 2}
wandb: {enabled: true, project: p, entity: e, api_key: wandb-secret, run_name: null}
temperature_schedule: {enabled: true, initial: 0.3, final: 0.8, warmup_steps: 100}
generation_config: {temperature: 0.3, top_p: 0.95, top_k: 50, max_new_tokens: 4096, do_sample: true}
debug: false
verbose: true
"""
MODELS = """\
models:
  "gpt-4o-mini": {api_type: openai, base_url: "https://api.openai.com/v1", api_key: sk-other, temperature: 0}
  "local-oss":
    api_type: openai
    base_url: http://127.0.0.1:8002/v1
    api_key: sk-secret-value
    model_name: gpt-oss-120b
    temperature: 0.1
    top_p: 0.9
    no_proxy: true
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    return tmp_path


def add(root: Path, text: str, name: str = "mine") -> str:
    (root / "profiles" / f"{name}.yaml").write_text(text)
    return name


def settings_of(tree: Any, prefix: str = "") -> set[str]:
    if not isinstance(tree, Mapping):
        return {prefix}
    return {dotted for key, value in tree.items() for dotted in settings_of(value, f"{prefix}.{key}".strip("."))}


@pytest.mark.parametrize("name", profile.available(ROOT))
def test_every_shipped_profile_fits_the_schema(root: Path, name: str) -> None:
    assert profile.use(name, root)
    params.load(root / "params.yaml")


def test_the_shipped_profiles_are_those_for_a_small_and_a_large_model() -> None:
    assert profile.available(ROOT) == ["qwen2.5-0.5b", "qwen2.5-7b"]


def test_using_one_shipped_profile_after_another_leaves_nothing_of_the_first(root: Path) -> None:
    profile.use("qwen2.5-7b", root)
    alone = params.load(root / "params.yaml")
    profile.use("qwen2.5-0.5b", root)
    profile.use("qwen2.5-7b", root)
    assert params.load(root / "params.yaml") == alone
    profile.use("qwen2.5-0.5b", root)
    small = params.load(root / "params.yaml")
    shutil.copy(ROOT / "params.yaml", root)
    profile.use("qwen2.5-0.5b", root)
    assert params.load(root / "params.yaml") == small


def test_the_large_profile_pins_its_model_and_data(root: Path) -> None:
    profile.use("qwen2.5-7b", root)
    settings = params.load(root / "params.yaml")
    assert settings.base.model == "Qwen/Qwen2.5-7B-Instruct"
    assert settings.base.revision == "a09a35458c702b33eeacc393d103063234e8bc28"
    assert settings.train.lora.rank == settings.train.lora.alpha == 64
    assert settings.train.learning_rate == 1e-5
    assert settings.workflow.executor == settings.solve.model == "gpt-oss-120b"
    assert settings.judge.models == list(settings.models) == ["gpt-oss-120b"]
    assert set(settings.mix.weights) == set(settings.fetch) == {"gsm8k", "humaneval"}
    assert all(source.sha256.keys() == source.files.keys() for source in settings.fetch.values())


def test_changes_are_listed_old_to_new(root: Path) -> None:
    add(root, "train: {max_steps: 7, seed: 0}\nsandbox: {parallel: 9, isolation: none}\n")
    assert profile.use("mine", root) == [
        f"train.max_steps: {MAX_STEPS} -> 7",
        "sandbox.parallel: 4 -> 9",
        "sandbox.isolation: auto -> none",
    ]


def test_comments_and_order_stay(root: Path) -> None:
    before = (root / "params.yaml").read_text().splitlines()
    add(root, "train: {max_steps: 7}\n")
    profile.use("mine", root)
    after = (root / "params.yaml").read_text().splitlines()
    assert [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]] == [
        (f"  max_steps: {MAX_STEPS}", "  max_steps: 7")
    ]


def test_a_section_is_merged_and_a_map_of_free_keys_is_replaced(root: Path) -> None:
    add(root, "fetch:\n  places: {test: 9}\nmix: {weights: {places: 2}, seed: 1}\ntrain: {lora: {rank: 4}}\n")
    profile.use("mine", root)
    settings = params.load(root / "params.yaml")
    assert list(settings.fetch) == ["places"]
    assert settings.fetch["places"].train == 0
    assert settings.mix.weights == {"places": 2}
    assert settings.mix.seed == 1
    assert settings.mix.type_ratios == {"math": 0.25, "code": 0.25, "qa": 0.5}
    assert settings.train.lora.rank == 4
    assert settings.train.lora.alpha == 16


def test_the_lines_around_a_replaced_map_stay(root: Path) -> None:
    path = root / "params.yaml"
    path.write_text(path.read_text().replace("\nmix:", "\n# what is mixed\nmix:"))
    profile.use("qwen2.5-7b", root)
    profile.use("qwen2.5-0.5b", root)
    lines = path.read_text().splitlines()
    at = lines.index("# what is mixed")
    assert lines[at - 1] == ""
    assert lines[at + 1] == "mix:"
    assert "  functions:" in "\n".join(lines[:at])


def test_small_numbers_stay_numbers_for_every_reader_of_yaml(root: Path) -> None:
    profile.apply({"train": {"learning_rate": 1e-05}}, root / "params.yaml")
    assert "learning_rate: 1.0e-05" in (root / "params.yaml").read_text()


def test_a_second_use_changes_nothing_and_does_not_touch_the_file(root: Path) -> None:
    profile.use("qwen2.5-7b", root)
    before = (root / "params.yaml").stat().st_mtime_ns, (root / "params.yaml").read_bytes()
    assert profile.use("qwen2.5-7b", root) == []
    assert ((root / "params.yaml").stat().st_mtime_ns, (root / "params.yaml").read_bytes()) == before


def test_an_unknown_profile_names_those_that_there_are(root: Path) -> None:
    with pytest.raises(SettingsError, match=r"no profile 'qwen3'; there are: qwen2\.5-0\.5b, qwen2\.5-7b"):
        profile.use("qwen3", root)
    with pytest.raises(SettingsError, match="no profile"):
        profile.use("../params", root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train: {learning_rte: 1.0}\n",
            r"train.learning_rte: no such setting; did you mean train.learning_rate\?",
        ),
        ("train: {max_steps: many}\n", "train.max_steps is 'many'"),
        ("mix: {weights: {gsm8k: 1}}\n", "sources that fetch lacks: gsm8k"),
        ("train: 3\n", "train is 3; expected a section"),
        ("train:\n  max_steps: [1\n", r"mine\.yaml, line \d: not valid YAML"),
        ("", "expected a mapping, found nothing"),
    ],
)
def test_a_bad_profile_is_refused_and_nothing_is_written(root: Path, text: str, message: str) -> None:
    before = (root / "params.yaml").read_bytes()
    add(root, text)
    with pytest.raises(SettingsError, match=message):
        profile.use("mine", root)
    assert (root / "params.yaml").read_bytes() == before
    assert [path.name for path in root.iterdir() if path.name.endswith(".part")] == []


def test_a_missing_params_file_is_named(root: Path) -> None:
    (root / "params.yaml").unlink()
    with pytest.raises(SettingsError, match=r"params\.yaml: no such file"):
        profile.use("qwen2.5-7b", root)


def test_the_file_keeps_its_mode_and_a_link_stays_a_link(root: Path) -> None:
    real = root / "elsewhere.yaml"
    (root / "params.yaml").rename(real)
    real.chmod(0o640)
    (root / "params.yaml").symlink_to(real)
    profile.use("qwen2.5-7b", root)
    assert (root / "params.yaml").is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert params.load(real).base.model == "Qwen/Qwen2.5-7B-Instruct"


def original(root: Path, training: str = TRAINING, models: str | None = MODELS) -> settings_files.Imported:
    (root / "training.yaml").write_text(training)
    if models is not None:
        (root / "aflow_llm.yaml").write_text(models)
    return settings_files.import_original(
        root / "training.yaml", root / "aflow_llm.yaml" if models is not None else None
    )


def test_an_import_gives_settings_that_fit(root: Path) -> None:
    profile.apply(original(root).patch, root / "params.yaml")
    settings = params.load(root / "params.yaml")
    assert settings.tracking.experiment == "aflow_grpo"
    assert settings.train.max_steps == 500
    assert settings.train.prompts_per_step == 4
    assert settings.train.group_size == 6
    assert settings.train.kl_coef == 0.001
    assert settings.train.learning_rate == 1e-5
    assert settings.train.max_prompt_tokens == 3072
    assert settings.train.max_completion_tokens == settings.evaluate.max_gen_tokens == 5120
    assert (settings.train.temperature, settings.train.temperature_end) == (0.3, 0.8)
    assert settings.train.temperature_steps == 100
    assert settings.train.warmup_steps == 50
    assert settings.train.dtype == "bfloat16"
    assert settings.train.lora.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert settings.mix.type_ratios == {"math": 0.4, "code": 0.3, "qa": 0.3}
    asked = ["Custom", "AnswerGenerate", "Programmer", "ScEnsemble", "Test", "Review", "Revise"]
    assert settings.workflow.operators == asked
    assert settings.workflow.wall_s == 600
    assert settings.base.model == "Qwen/Qwen2.5-7B-Instruct"
    assert settings.workflow.executor == settings.solve.model == "local-oss"
    assert settings.judge.models == ["local-oss"]
    assert set(settings.models) == {"local-oss", "gpt-4o-mini"}
    chosen = settings.models["local-oss"]
    assert (chosen.url, chosen.model) == ("http://127.0.0.1:8002/v1", "gpt-oss-120b")
    assert (chosen.temperature, chosen.top_p, chosen.no_proxy) == (0.1, 0.9, True)


def test_every_key_of_the_original_has_a_note_and_every_note_a_reason(root: Path) -> None:
    notes = original(root).notes
    keys = {note.key for note in notes}
    with (root / "training.yaml").open() as training:
        named = {line.split(":")[0] for line in training}
    assert named <= {key.split(".")[0] for key in keys}
    assert all(note.reason for note in notes)
    assert [note for note in notes if note.reason.startswith("no key of")] == []


def test_every_setting_that_a_note_names_exists() -> None:
    known = {dotted for name in Params.model_fields for dotted in _settings(name)}
    for rule in settings_files.RULES.values():
        changes, _ = rule("Custom", {"models": {"Custom": {}}})
        assert set(changes) <= known
    for rule in settings_files.MODEL_RULES.values():
        changes, _ = rule("Custom", {})
        assert set(changes) <= set(params.Model.model_fields)


def _settings(name: str) -> set[str]:
    section = params.section(name)
    return {dotted for dotted, _ in params.settings(section, name)}


def test_keys_are_known_however_deep_they_lie(root: Path) -> None:
    nested = "run:\n  optimizer: {lr: 1e-5}\n  grpo:\n    ppo_epochs: 2\nlora: {rank: 32, alpha: 8}\n"
    assert original(root, nested, None).patch == {
        "train": {"learning_rate": 1e-5, "ppo_epochs": 2, "lora": {"rank": 32, "alpha": 8}}
    }


def test_an_unknown_key_is_reported(root: Path) -> None:
    found = original(root, "max_steps: 1\nflux_capacitor: {power: 3}\n", "models: {m: {colour: red}}\nextra: 1\n")
    unknown = [note.key for note in found.notes if note.reason == "no key of the original's"]
    assert unknown == ["flux_capacitor.power", "models.m.colour", "extra"]


def test_a_key_of_two_meanings_goes_by_its_section(root: Path) -> None:
    found = original(root, "warmup_steps: 50\ntemperature_schedule: {warmup_steps: 100}\n", None)
    assert found.patch == {"train": {"warmup_steps": 50, "temperature_steps": 100}}


def test_a_schedule_that_is_off_leaves_the_temperature_constant(root: Path) -> None:
    text = "generation_config: {temperature: 0.2}\ntemperature_schedule: {enabled: false, initial: 0.3}\n"
    assert original(root, text, None).patch == {
        "train": {"temperature": 0.2, "temperature_end": 0.2, "temperature_steps": 0}
    }


def test_a_kl_that_is_off_has_no_weight(root: Path) -> None:
    assert original(root, "use_kl_loss: false\nkl_loss_coef: 0.001\n", None).patch == {"train": {"kl_coef": 0.0}}


def test_operators_that_are_not_offered_are_named(root: Path) -> None:
    note = next(note for note in original(root).notes if note.key == "aflow_operators")
    assert note.to == "workflow.operators"
    assert note.reason == "not offered here: Plan"


def test_no_secret_reaches_settings_or_notes(root: Path) -> None:
    found = original(root)
    for secret in ("sk-secret-value", "sk-other", "wandb-secret"):
        assert secret not in repr(found)
    assert found.patch["models"]["local-oss"]["api_key_env"] == settings_files.KEY_VARIABLE
    advice = next(note for note in found.notes if note.key == "models.local-oss.api_key")
    assert f"export {settings_files.KEY_VARIABLE}=" in advice.reason


def test_a_stand_in_for_a_key_means_no_key(root: Path) -> None:
    found = original(root, "max_steps: 1\n", "models: {m: {api_key: EMPTY}}\n")
    assert found.patch["models"]["m"]["api_key_env"] == ""


def test_a_model_without_model_name_goes_by_its_key(root: Path) -> None:
    found = original(root, "max_steps: 1\n", "models: {gpt-4o-mini: {base_url: http://x/v1}}\n")
    assert found.patch["models"] == {"gpt-4o-mini": {"model": "gpt-4o-mini", "url": "http://x/v1"}}
    assert found.patch["workflow"] == {"executor": "gpt-4o-mini"}


@pytest.mark.parametrize("wanted", ["gpt-4.1", "b"])
def test_the_executor_is_named_by_its_key_or_by_its_name_at_the_server(root: Path, wanted: str) -> None:
    models = "models: {a: {model_name: a1}, gpt-4.1: {model_name: b}}\n"
    found = original(root, f"aflow_executor_model: {wanted}\n", models)
    assert found.patch["workflow"] == {"executor": "gpt-4-1"}
    assert found.patch["judge"] == {"models": ["gpt-4-1"]}


def test_an_executor_that_is_not_in_the_file_is_said_and_the_first_takes_its_place(root: Path) -> None:
    found = original(root, "aflow_executor_model: c\n", "models: {a: {}, b: {}}\n")
    assert Note("aflow_executor_model", None, "aflow_llm.yaml has only a, b") in found.notes
    assert found.patch["workflow"] == {"executor": "a"}


def test_without_the_file_of_models_the_executor_stays(root: Path) -> None:
    found = original(root, "aflow_executor_model: c\n", None)
    assert found.notes == [Note("aflow_executor_model", None, "its address is in aflow_llm.yaml: import both files")]
    assert found.patch == {}


def test_a_file_that_is_no_list_of_models_is_refused(root: Path) -> None:
    with pytest.raises(SettingsError, match="expected `models:`"):
        original(root, "max_steps: 1\n", "models: [a]\n")
