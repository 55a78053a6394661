"""One loaded base that answers for itself and its adapters: by transformers in test_worker.py, here by vLLM."""

from pathlib import Path

import pytest

from gradeflow.adapter import vllm
from gradeflow.evaluation import process, worker
from support import evaluation

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_one_engine_of_vllm_answers_for_base_and_adapters_as_transformers_does(
    tiny_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if not vllm.program(ROOT).is_file():
        pytest.skip("vLLM is not installed: make vllm")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    plan = evaluation.plan(tiny_world, tmp_path / "vllm", 0, 1, backend="vllm", max_model_len=128)
    process.run(plan)
    said = "".join(capfd.readouterr())
    assert said.count("Initializing a V1 LLM engine") == 1
    other = evaluation.plan(tiny_world, tmp_path / "hf", 0, 1, max_model_len=128)
    worker.run(other)
    for subject in plan.subjects:
        assert evaluation.replies(plan, subject, "sums") == evaluation.replies(other, subject, "sums")
        ours, theirs = (evaluation.replies(one, subject, "choices") for one in (plan, other))
        assert log_probs(ours) == pytest.approx(log_probs(theirs), abs=1e-3)
    for task in ("sums", "choices"):
        base, first, second = (evaluation.replies(plan, subject, task) for subject in plan.subjects)
        assert base != first != second != base


def log_probs(replies: list[list[list[list[str]]]]) -> list[float]:
    return [float(log_prob) for question in replies for ((log_prob, _),) in question]
