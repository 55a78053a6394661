from pathlib import Path

import pytest

from gradeflow import lineage
from gradeflow.adapter import BaseIdentity
from gradeflow.errors import PromotionError

BASE = BaseIdentity("gradeflow-base-0123456789ab", "", "0123")
SOURCES = lineage.Sources(
    base=BASE,
    training_run="t1",
    evaluation_run="e1",
    git={"gradeflow.git.commit": "c0ffee"},
    data={"train_mixed": "aa"},
    dvc={"data/mixed/train_mixed.jsonl": "aa"},
    scorer="gradeflow-scorer/1+ab",
    judge_model="",
    judge_prompt="",
)


def test_a_version_is_tagged_with_what_is_known_of_it() -> None:
    assert lineage.collect(SOURCES) == {
        "gradeflow.base.name": BASE.name,
        "gradeflow.base.digest": "0123",
        "gradeflow.run.training": "t1",
        "gradeflow.run.evaluation": "e1",
        "gradeflow.scorer.version": "gradeflow-scorer/1+ab",
        "gradeflow.git.commit": "c0ffee",
        "gradeflow.data.train_mixed": "aa",
        "gradeflow.dvc.data/mixed/train_mixed.jsonl": "aa",
    }


def test_the_base_is_read_back_from_the_tags() -> None:
    assert lineage.base_identity(lineage.collect(SOURCES)) == BASE


def test_dvc_lock_tells_the_digest_of_every_output(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text(
        "schema: '2.0'\n"
        "stages:\n"
        "  fetch@words:\n    cmd: x\n    outs:\n    - {path: data/raw/words.jsonl, md5: aa, size: 1}\n"
        "  mix:\n    cmd: y\n    deps:\n    - {path: data/raw, md5: zz.dir}\n"
        "    outs:\n    - {path: data/mixed/train_mixed.jsonl, hash: md5, md5: bb, size: 2}\n"
        "  last:\n    cmd: z\n"
    )
    assert lineage.dvc_lock_digests(tmp_path) == {
        "data/raw/words.jsonl": "aa",
        "data/mixed/train_mixed.jsonl": "bb",
    }


def test_without_a_dvc_lock_there_are_no_digests(tmp_path: Path) -> None:
    assert lineage.dvc_lock_digests(tmp_path) == {}


@pytest.mark.parametrize("text", ["stages: [", "[]", "stages:\n  mix:\n    outs:\n    - {path: x}\n"])
def test_a_broken_dvc_lock_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "dvc.lock").write_text(text)
    with pytest.raises(PromotionError, match=r"dvc.lock: not a dvc.lock"):
        lineage.dvc_lock_digests(tmp_path)
