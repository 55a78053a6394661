import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gradeflow import params
from gradeflow.errors import SettingsError
from gradeflow.params import Params

SHIPPED = Path(__file__).parents[1] / "params.yaml"


# Lines that the tests spoil, whatever values are shipped; `base` may have train's learning rate, and comes before it.
LEARNING_RATE = re.findall(r"^  learning_rate: .*$", SHIPPED.read_text(), re.MULTILINE)[-1]
(GROUP_SIZE,) = re.findall(r"^  group_size: .*$", SHIPPED.read_text(), re.MULTILINE)
(TARGETS,) = re.findall(r"target_modules: \[.*\]", SHIPPED.read_text())


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write params.yaml with one piece of its text replaced."""

    def written(old: str = "", new: str = "") -> Path:
        text = SHIPPED.read_text()
        assert old in text
        path = tmp_path / "params.yaml"
        head, _, tail = text.rpartition(old) if old == LEARNING_RATE else text.partition(old)
        path.write_text(head + new + tail if old else text)
        return path

    return written


def every_setting() -> dict[str, Any]:
    sections = {f"{name}.base" if name == "models" else name: params.section(name) for name in Params.model_fields}
    del sections["fetch"]
    return {dotted: info for name, section in sections.items() for dotted, info in params.settings(section, name)}


def value_of(dotted: str, settings: Any) -> Any:
    for key in dotted.split("."):
        settings = settings[key] if isinstance(settings, dict) else getattr(settings, key)
    return settings


def test_params_yaml_fits_the_schema() -> None:
    assert params.load(SHIPPED).train.lora.rank == 8


def test_params_yaml_holds_every_setting_and_nothing_else() -> None:
    tree = YAML(typ="safe", pure=True).load(SHIPPED)
    for dotted in every_setting():
        value_of(dotted, tree)
    assert list(tree) == list(Params.model_fields)


def test_only_entries_by_name_have_defaults() -> None:
    with_defaults = [name for name, info in every_setting().items() if not info.is_required()]
    assert [name for name in with_defaults if not name.startswith("models.")] == []


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, info in every_setting().items() if not info.description] == []
    assert all(info.description for info in params.Source.model_fields.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            LEARNING_RATE,
            "  learning_rte: 2.0e-3",
            "train.learning_rte: no such setting; did you mean train.learning_rate?",
        ),
        ("    rank: 8", "    rnk: 8", "train.lora.rnk: no such setting; did you mean train.lora.rank?"),
        ("solve:\n", "sovle:\n", "sovle: no such setting; did you mean solve?"),
        ("  max_turns: 3", "  zzz: 3", "solve.zzz: no such setting; known here: model, workflow, benchmark"),
        ("  max_turns: 3", "  max_turns: many", "solve.max_turns is 'many'; expected a valid integer"),
        ("  max_turns: 3", "  max_turns: 2.5", "solve.max_turns is 2.5; expected a valid integer"),
        ("  max_turns: 3", "  max_turns: [3]", "solve.max_turns is [3]; expected a valid integer"),
        (
            "  no_proxy: false",
            "  no_proxy: perhaps",
            "models.base.no_proxy is 'perhaps'; expected a valid boolean",
        ),
        (GROUP_SIZE, "  group_size: 1", "train.group_size is 1; expected greater than or equal to 2"),
        ("  top_p: 1.0", "  top_p: 1.5", "models.base.top_p is 1.5; expected less than or equal to 1"),
        (
            LEARNING_RATE,
            "  learning_rate: 0",
            "train.learning_rate is 0; expected greater than 0",
        ),
        (
            LEARNING_RATE,
            "  learning_rate: .nan",
            "train.learning_rate is nan; expected a finite number",
        ),
        (
            LEARNING_RATE,
            "  learning_rate: .inf",
            "train.learning_rate is inf; expected a finite number",
        ),
        ("  dtype: float32", "  dtype: int8", "train.dtype is 'int8'; expected"),
        ("  port: 8000", "  port: 70000", "serve.port is 70000; expected less than or equal to 65535"),
        ("  hidden_size: 128", "  hidden_size: 100", "base.hidden_size is 100; expected a multiple of 32"),
        ("Custom, AnswerGenerate", "Custom, Anser", "workflow.operators.1 is 'Anser'; expected"),
        (
            TARGETS,
            "target_modules: []",
            "train.lora.target_modules is []; expected",
        ),
        ("math: 0.25, code: 0.25, qa: 0.5", "", "mix.type_ratios is {}; expected"),
        ("\nmix:\n", "\nmix: 3\nmax:\n", "mix is 3; expected a section with settings"),
        ("\nmix:\n", "\n2020-01-01: 1\nmix:\n", "2020-01-01 is a name; expected text there"),
        ("  max_turns: 3\n", "", "solve.max_turns: missing, and every setting must be there"),
        (
            'tracking:\n  uri: ""\n  experiment: gradeflow\n',
            "",
            "tracking: missing, and every setting must be there",
        ),
        (
            "train: 3000, validation: 300, test: 300, seed: 1",
            "seed: 1",
            "fetch.word_problems: either row counts",
        ),
        (
            "train: 3000, validation: 300, test: 300, seed: 1",
            "train: 1, files: {train: a}",
            "fetch.word_problems: either row counts",
        ),
        (
            "train: 3000, validation: 300, test: 300, seed: 1",
            "files: {train: a}, sha256: {test: b}",
            "sha256 names splits without a file: test",
        ),
        (
            "train: 3000, validation: 300, test: 300, seed: 1",
            "files: {train: a}, mirror: b",
            "fetch.word_problems: mirror holds published files",
        ),
        (
            "train: 3000, validation: 300, test: 300, seed: 1",
            "bad_rows: skip",
            "fetch.word_problems.bad_rows is 'skip'; expected 'stop' or 'set aside'",
        ),
        ("{word_problems: 1,", "{gsm8k: 1,", "mix.weights names sources that fetch lacks: gsm8k"),
        (
            "{word_problems: 1,",
            "{word_problems: 0,",
            "mix.weights.word_problems is 0; expected greater than 0",
        ),
        ("math: 0.25", "maths: 0.25", "mix.type_ratios.maths"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_holds_and_what_was_expected(
    write: Callable[..., Path], old: str, new: str, message: str
) -> None:
    path = write(old, new)
    with pytest.raises(SettingsError) as caught:
        params.load(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_all_wrong_settings_are_told_at_once_one_a_line(write: Callable[..., Path]) -> None:
    path = write("  max_turns: 3", "  max_turns: many\n  color: red")
    with pytest.raises(SettingsError) as caught:
        params.load(path)
    assert len(str(caught.value).splitlines()) == 2


def test_a_misspelt_setting_is_told_once_and_not_as_missing_too(write: Callable[..., Path]) -> None:
    path = write("  max_turns: 3", "  max_turn: 3")
    with pytest.raises(SettingsError) as caught:
        params.load(path)
    assert str(caught.value) == f"{path}: solve.max_turn: no such setting; did you mean solve.max_turns?"


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "0.00001", "1E-5"])
def test_a_small_number_is_a_number_however_it_is_written(write: Callable[..., Path], text: str) -> None:
    path = write(LEARNING_RATE, f"  learning_rate: {text}")
    assert params.load(path).train.learning_rate == 1e-5
    assert params.load(SHIPPED, {"train.learning_rate": text}).train.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("train.max_steps", "5", 5),
        ("train.lora.rank", "64", 64),
        ("train.gradient_checkpointing", "true", True),
        ("workflow.operators", "[Custom, Programmer]", ["Custom", "Programmer"]),
        ("mix.weights", "{places: 2, turns: 1}", {"places": 2, "turns": 1}),
        ("mix.weights.places", "3", {"word_problems": 1, "turns": 1, "places": 3, "functions": 1}),
        ("fetch.places.train", "50", 50),
        ("models.base.model", "1e5", "1e5"),
        ("models.base.model", "true", "true"),
        ("models.base.model", "null", "null"),
        ("models.base.model", "[a", "[a"),
        ("models.base.model", "", ""),
        ("base.folder", "other/models", Path("other/models")),
        ("serve.port", "0", 0),
    ],
)
def test_an_override_reaches_the_setting_it_names(name: str, text: str, expected: object) -> None:
    settings = params.load(SHIPPED, {name: text})
    assert value_of("mix.weights" if name == "mix.weights.places" else name, settings) == expected


def test_a_new_source_can_come_from_the_command_line() -> None:
    settings = params.load(SHIPPED, {"fetch.gsm8k.files.test": "data/test.jsonl", "mix.weights.gsm8k": "1"})
    assert settings.fetch["gsm8k"].files == {"test": "data/test.jsonl"}


def test_a_source_with_nothing_said_of_it_is_a_published_one() -> None:
    assert params.load(SHIPPED, {"fetch.gsm8k": "{}"}).fetch["gsm8k"] == params.Source()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.learning_rte", "1e-5", "did you mean train.learning_rate?"),
        ("train.max_steps", "many", "train.max_steps is 'many'; expected a valid integer"),
        ("train.max_steps", "", "train.max_steps is ''; expected a valid integer"),
        ("train.max_steps", "0", "train.max_steps is 0; expected greater than 0"),
        ("train.max_steps.more", "1", "max_steps is a value, not a section"),
        ("trian.max_steps", "1", "trian: no such setting; did you mean train?"),
        ("fetch.places.trian", "1", "did you mean fetch.places.train?"),
        ("train.lora", "8", "train.lora is 8"),
        ("workflow.operators", "[Custom", "workflow.operators is '[Custom'"),
    ],
)
def test_a_wrong_override_ends_in_one_clear_line(name: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        params.load(SHIPPED, {name: text})
    assert message in str(caught.value)


def test_malformed_yaml_names_its_line(write: Callable[..., Path]) -> None:
    path = write("mix:\n", "mix: [\n")
    with pytest.raises(SettingsError, match=r"params\.yaml, line \d+: not valid YAML: "):
        params.load(path)


def test_a_setting_given_twice_is_no_valid_yaml(write: Callable[..., Path]) -> None:
    path = write("  max_turns: 3\n", "  max_turns: 3\n  max_turns: 4\n")
    with pytest.raises(SettingsError, match="not valid YAML"):
        params.load(path)


def test_a_tag_that_would_make_an_object_is_refused(write: Callable[..., Path]) -> None:
    path = write("  max_turns: 3", "  max_turns: !!python/object/apply:os.getpid []")
    with pytest.raises(SettingsError):
        params.load(path)


def test_a_missing_file_says_where_to_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"params\.yaml: no such file\. Run in the project's folder"):
        params.load(tmp_path / "params.yaml")


@pytest.mark.parametrize(
    ("content", "found"), [(b"", "nothing"), (b"# all\n", "nothing"), (b"- a\n- b\n", "list"), (b"text", "str")]
)
def test_what_is_no_mapping_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=rf"expected a mapping of sections \(fetch, mix, .*\), found {found}"):
        params.load(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"train: \xff\xfe\n", "not UTF-8 at byte 7; save it as UTF-8"),
        (b"train: \x00\n", "not valid YAML: unacceptable character"),
        (b"train: " + b"[" * 2000, "not valid YAML: nested too deeply"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        params.load(path)
    assert str(caught.value).startswith(f"{path}: {said}")
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{tmp_path}: cannot be read: Is a directory"):
        params.load(tmp_path)


def test_settings_do_not_change_once_read() -> None:
    settings = params.load(SHIPPED)
    with pytest.raises(ValueError, match="frozen"):
        settings.train.max_steps = 1  # type: ignore[misc]


def test_a_section_travels_whole() -> None:
    settings = params.load(SHIPPED)
    assert params.validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("dotted", "name"),
    [
        ("train.max_steps", "int"),
        ("train.learning_rate", "float"),
        ("train.gradient_checkpointing", "true | false"),
        ("train.scale_rewards", "group | batch | none"),
        ("workflow.operators", "list"),
        ("mix.weights", "map"),
        ("models.base.model", "text"),
        ("base.folder", "path"),
        ("serve.port", "int"),
        ("promote.minimum_effect", "float"),
    ],
)
def test_types_have_names_that_users_know(dotted: str, name: str) -> None:
    assert params.type_name(every_setting()[dotted].annotation) == name
