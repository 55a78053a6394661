import json
from pathlib import Path

import pytest

from gradeflow import agent, prompt, registry, tracking
from gradeflow.errors import TrackingError
from gradeflow.registry import Version
from gradeflow.workflow import operators

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


@pytest.fixture
def run_id(store: Path) -> str:
    with tracking.start_run("train_grpo", {}) as run:
        return run.id


def files(folder: Path, text: str = "weights") -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_text(text)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def register(folder: Path, run_id: str, name: str, digest: str = "d" * 64, **tags: str) -> Version:
    return registry.register(folder, name, digest=digest, run_id=run_id, step=7, tags=tags)


def test_a_version_holds_the_adapters_files_and_its_tags(run_id: str, tmp_path: Path) -> None:
    version = register(files(tmp_path / "a"), run_id, "whole", origin="test")
    assert (version.name, version.version, version.digest, version.tags["origin"]) == (
        "whole",
        1,
        "d" * 64,
        "test",
    )
    found = registry.fetch(version, tmp_path / "cache")
    assert (found / "adapter_model.safetensors").read_text() == "weights"
    assert names(found) == ["MLmodel", "adapter_config.json", "adapter_model.safetensors", "requirements.txt"]


def test_the_training_run_names_the_adapter_as_its_output(run_id: str, tmp_path: Path) -> None:
    import mlflow

    version = register(files(tmp_path / "a"), run_id, "output")
    outputs = mlflow.MlflowClient().get_run(run_id).outputs.model_outputs
    assert [(output.model_id, output.step) for output in outputs] == [(version.model_id, 7)]


def test_the_same_adapter_is_registered_once_and_keeps_its_tags(run_id: str, tmp_path: Path) -> None:
    first = register(files(tmp_path / "a"), run_id, "once", origin="one")
    again = register(tmp_path / "a", run_id, "once", origin="two", more="three")
    other = register(files(tmp_path / "b", "other"), run_id, "once", digest="e" * 64)
    assert (first.version, again.version, other.version) == (1, 1, 2)
    assert (again.tags["origin"], again.tags["more"]) == ("one", "three")
    assert again.model_id == first.model_id


def test_an_upload_that_was_cut_off_is_made_again(run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(mlflow.MlflowClient, "log_model_artifacts", die)
        with pytest.raises(KeyboardInterrupt):
            register(files(tmp_path / "a"), run_id, "cut")
    version = register(tmp_path / "a", run_id, "cut")
    assert not registry.changed_files(version, registry.download(version, tmp_path / "got"))


def test_an_alias_moves_and_is_found_by_every_spelling(run_id: str, tmp_path: Path) -> None:
    first = register(files(tmp_path / "a"), run_id, "named")
    second = register(files(tmp_path / "b", "other"), run_id, "named", digest="e" * 64)
    registry.set_alias(first, "champion")
    registry.set_alias(second, "champion")
    for spelling in ("named@champion", "models:/named@champion", "named/2", "models:/named/2"):
        found = registry.resolve(spelling)
        assert found
        assert (found.version, found.digest) == (2, second.digest)
    registry.delete_alias("named", "champion")
    assert registry.get_alias("named", "champion") is None


@pytest.mark.parametrize("reference", ["nobody@champion", "nobody/1", "models:/nobody@x"])
def test_what_is_not_registered_is_none(store: Path, reference: str) -> None:
    assert registry.resolve(reference) is None


@pytest.mark.parametrize("reference", ["gradeflow-policy", "name/three", ""])
def test_what_is_no_reference_is_refused(store: Path, reference: str) -> None:
    with pytest.raises(TrackingError, match="expected name@alias or name/3"):
        registry.resolve(reference)


def test_a_spoilt_copy_in_the_cache_is_fetched_again(run_id: str, tmp_path: Path) -> None:
    version = register(files(tmp_path / "a"), run_id, "cached")
    found = registry.fetch(version, tmp_path / "cache")
    (found / "adapter_model.safetensors").write_text("spoilt")
    assert registry.fetch(version, tmp_path / "cache") == found
    assert (found / "adapter_model.safetensors").read_text() == "weights"
    assert names(tmp_path / "cache") == [found.name]


def test_a_changed_file_in_the_store_is_never_handed_out(run_id: str, store: Path, tmp_path: Path) -> None:
    version = register(files(tmp_path / "a"), run_id, "changed")
    (stored,) = (store / "mlruns").rglob(f"{version.model_id}/**/adapter_model.safetensors")
    stored.write_text("weightz")
    with pytest.raises(TrackingError, match=r"not those registered: adapter_model.safetensors"):
        registry.fetch(version, tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_a_registered_model_says_what_it_holds_and_what_its_aliases_mean(run_id: str, tmp_path: Path) -> None:
    import mlflow

    register(files(tmp_path / "a"), run_id, "about")
    register(files(tmp_path / "b", "other"), run_id, "about", digest="e" * 64)
    said = mlflow.MlflowClient().get_registered_model("about").description
    assert all(f"`{alias}`" in said for alias in ("champion", "previous", "candidate", "challenger"))


def test_descriptions_grow_line_by_line(run_id: str, tmp_path: Path) -> None:
    import mlflow

    version = register(files(tmp_path / "a"), run_id, "described")
    for line in ("first", "second", "first"):
        registry.describe(version, line)
    assert mlflow.MlflowClient().get_model_version("described", "1").description == "first\n\nsecond"


def linked(run_id: str) -> dict[str, int]:
    tags = tracking.read_tags(run_id)
    return {one["name"]: int(one["version"]) for one in json.loads(tags["mlflow.linkedPrompts"])}


def record(*names: str) -> str:
    with tracking.start_run("train_grpo", {}) as run:
        registry.record_prompts(run, [prompt.load(name) for name in names])
    return run.id


def test_a_prompt_has_one_version_for_each_text(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = record("custom", "judge"), record("judge", "policy")
    assert linked(first) == {"gradeflow.custom": 1, "gradeflow.judge": 1}
    assert linked(again) == {"gradeflow.judge": 1, "gradeflow.policy": 1}
    texts = {name: prompt.load(name) for name in ("custom", "judge")} | {"judge": prompt.Prompt("judge", "{question}?")}
    monkeypatch.setattr(prompt, "load", texts.__getitem__)
    changed = record("custom", "judge")
    assert linked(changed) == {"gradeflow.custom": 1, "gradeflow.judge": 2}
    assert json.loads(tracking.read_tags(changed)["gradeflow.prompts"]) == {
        name: one.version for name, one in texts.items()
    }
    monkeypatch.undo()
    assert linked(record("judge")) == {"gradeflow.judge": 1}


def test_a_prompt_from_the_registry_reads_as_ours_does(store: Path) -> None:
    import mlflow

    values = {"instruction": "Be {brief}.", "input": "{{x}} \\1"}
    version = linked(record("custom"))["gradeflow.custom"]
    found = mlflow.genai.load_prompt("gradeflow.custom", version=version)
    assert found.format(**values) == prompt.load("custom").render(**values)
    assert found.variables == {"instruction", "input"}
    assert found.tags["gradeflow.prompt.version"] == prompt.load("custom").version


def test_the_link_is_the_one_that_mlflow_makes(store: Path) -> None:
    import mlflow

    run_id = record("custom")
    before = tracking.read_tags(run_id)
    mlflow.MlflowClient().link_prompt_version_to_run(
        run_id, f"prompts:/gradeflow.custom/{linked(run_id)['gradeflow.custom']}"
    )
    assert tracking.read_tags(run_id) == before


def test_prompts_that_are_not_taken_cost_a_warning_and_not_the_run(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has the name that the prompt would get."""
    import mlflow

    taken = prompt.Prompt("taken", "{x}")
    mlflow.MlflowClient().create_registered_model("gradeflow.taken")
    monkeypatch.setattr(prompt, "load", {"taken": taken}.__getitem__)
    with pytest.warns(UserWarning, match="prompts are not in the registry: .*gradeflow.taken"):
        run_id = record("taken")
    tags = tracking.read_tags(run_id)
    assert json.loads(tags["gradeflow.prompts"]) == {"taken": taken.version}
    assert "mlflow.linkedPrompts" not in tags
    assert mlflow.get_run(run_id).info.status == "FINISHED"


def test_the_stages_record_every_prompt_that_there_is() -> None:
    files = Path(prompt.__file__).with_name("prompts").glob("*.txt")
    recorded = {"policy", "judge", *operators.prompts(operators.OPERATORS), *agent.PROMPTS}
    assert recorded == {file.stem for file in files}
