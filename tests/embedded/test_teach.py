import importlib
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gradeflow import params, prompt
from gradeflow.embedded import curriculum, teach
from gradeflow.embedded.recipe import recipe
from gradeflow.embedded.teach import Encoded
from gradeflow.workflow import operators

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def settings() -> params.Base:
    return params.load(ROOT / "params.yaml").base.model_copy(update={"hidden_size": 64, "layers": 2})


@pytest.fixture(scope="module")
def lessons() -> list[curriculum.Lesson]:
    return list(itertools.islice(curriculum.lessons(0), 400))


def some(count: int, length: int = 5) -> list[Encoded]:
    return [Encoded(list(range(length)), [100 + number]) for number in range(count)]


def test_packing_keeps_every_lesson_whole_and_wastes_little() -> None:
    rows = teach.pack(some(100), width=20, seed=0)
    assert sorted(one.reply[0] for row in rows for one in row) == list(range(100, 200))
    assert all(sum(map(len, row)) <= 20 for row in rows)
    assert len(rows) <= 36


def test_a_lesson_longer_than_a_row_is_left_out() -> None:
    assert teach.pack([Encoded([1] * 30, [2])], width=20, seed=0) == []


def test_positions_begin_anew_in_each_lesson_and_only_replies_are_learnt() -> None:
    ids, positions, labels = teach.tensors([[Encoded([5, 6], [7, 8]), Encoded([9], [10])]], width=8)
    assert ids.tolist() == [[5, 6, 7, 8, 9, 10, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert labels.tolist() == [[-100, 7, 8, -100, 10, -100, -100, -100]]


def test_lessons_in_one_row_do_not_see_each_other(settings: params.Base, lessons: list[curriculum.Lesson]) -> None:
    words = teach.tokenizer(lessons, settings.vocabulary)
    model = teach.blank_model(settings, words).eval()
    one, two = teach.encode(lessons[:2], words)
    width = len(one) + len(two)

    def hidden(first: Encoded) -> torch.Tensor:
        ids, positions, _ = teach.tensors([[first, two]], width)
        with torch.no_grad():
            return model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[
                0, len(first) :
            ]

    other = Encoded([7] * len(one.asked), one.reply)
    assert torch.allclose(hidden(one), hidden(other), atol=1e-5)


def test_the_tokenizer_has_single_digits_a_template_and_reads_back_what_it_wrote(
    settings: params.Base, lessons: list[curriculum.Lesson]
) -> None:
    words = teach.tokenizer(lessons, settings.vocabulary)
    assert len(words) <= settings.vocabulary
    assert len(words.encode("4711", add_special_tokens=False)) == 4
    text = 'def solve():\n    return "ü" * 47'
    assert words.decode(words.encode(text)) == text
    chat = words.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_the_first_heads_look_one_two_and_three_tokens_back(
    settings: params.Base, lessons: list[curriculum.Lesson]
) -> None:
    wide = settings.model_copy(update={"hidden_size": 128})
    words = teach.tokenizer(lessons, settings.vocabulary)
    model = teach.blank_model(wide, words)
    model.set_attn_implementation("eager")
    ids = torch.arange(40)[None] + 10
    with torch.no_grad():
        attention = model(ids, output_attentions=True).attentions[0][0]
    for head, distance in enumerate((1, 2, 3)):
        assert attention[head].diagonal(-distance).mean() > 0.8


def test_teaching_lowers_the_loss(settings: params.Base, lessons: list[curriculum.Lesson]) -> None:
    words = teach.tokenizer(lessons, settings.vocabulary)
    model = teach.blank_model(settings, words)
    said = list(teach.teach(model, teach.encode(lessons, words), settings.model_copy(update={"batch_tokens": 1024})))
    assert [one.step for one in said] == list(range(1, len(said) + 1))
    assert said[-1].loss < said[0].loss - 1


def test_the_recipe_changes_with_what_it_makes_and_not_with_where_it_lies(settings: params.Base) -> None:
    assert recipe(settings) == recipe(settings.model_copy(update={"folder": Path("elsewhere"), "measure": 1}))
    assert recipe(settings) != recipe(settings.model_copy(update={"seed": 1}))


def test_the_recipe_names_what_the_lessons_are_made_of_and_no_more(
    settings: params.Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt that lessons load is in it, and each source that a source of theirs imports."""
    load, loaded = prompt.load, set()
    monkeypatch.setattr(prompt, "load", lambda name: loaded.add(name) or load(name))
    list(itertools.islice(curriculum.lessons(0), 400))
    named = recipe(settings)
    assert loaded == set(named["prompts"])
    sources = {Path(file).stem for file in named["files"] if file.startswith("sources/")}
    for name in sources - {"__init__"}:
        imported = vars(importlib.import_module(f"gradeflow.sources.{name}")).values()
        found = {module.__name__ for module in imported if isinstance(module, ModuleType)}
        assert {one.rpartition(".")[2] for one in found if one.startswith("gradeflow.sources.")} <= sources
    assert operators.describe(["Test"]) not in str(named)


def test_every_loader_cuts_text_as_it_was_taught(
    settings: params.Base, lessons: list[curriculum.Lesson], tmp_path: Path
) -> None:
    """AutoTokenizer gives a Qwen2 model Qwen2's own rules; another cut would leave the base talking nonsense."""
    from transformers import AutoTokenizer

    words = teach.tokenizer(lessons, settings.vocabulary)
    teach.blank_model(settings, words).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    assert teach.encode(lessons, AutoTokenizer.from_pretrained(tmp_path)) == teach.encode(lessons, words)


def test_a_fresh_model_copies_from_its_context(settings: params.Base, lessons: list[curriculum.Lesson]) -> None:
    wide = settings.model_copy(update={"hidden_size": 128, "layers": 4})
    words = teach.tokenizer(lessons, settings.vocabulary)
    model = teach.blank_model(wide, words)
    once = torch.randint(3, len(words), (16, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        said = model(torch.cat([once, once], dim=1)).logits[:, 20:-1].argmax(-1)
    assert (said == once[:, 1:]).float().mean() > 0.5
