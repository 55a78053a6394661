"""The policy as an agent on modeling tasks: what it learns from, what it is worth, and that it learns."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params, tracking, train_grpo
from gradeflow.attempt import example_of
from gradeflow.background import Background
from gradeflow.benchmarks import Competition
from gradeflow.benchmarks.catalogue import Benchmark
from gradeflow.errors import ProviderError, SandboxError
from gradeflow.grpo.episodes import Episodes
from gradeflow.grpo.modeling import ModelingEnvironment, datasets
from gradeflow.grpo.modeling import tasks as tasks_of
from gradeflow.grpo.policy import Completion
from gradeflow.sandbox import Sandbox
from gradeflow.types import Rollout
from support import agents, attempts, solvers, tiny
from support.agents import CONCLUSION, experiment

pytestmark = pytest.mark.filterwarnings("ignore")  # torch, TRL, MLflow
GOOD = experiment(solvers.BLENDING)
SAMPLE = "import harness, shutil\nshutil.copy('sample_submission.csv', harness.inputs['submission'])"


class Scripted:
    """A stand-in for the policy: a token is the number of a reply, and replies come by turn."""

    own_model = True

    def __init__(self, replies: Sequence[str]) -> None:
        self.replies = replies
        self.prompts: list[int] = []

    def begin(self, episodes: int) -> None: ...

    async def complete(self, prompt: Sequence[int], seed: int, temperature: float, version: int) -> Completion:
        self.prompts.append(len(prompt))
        return Completion((len(self.prompts) - 1,), ())

    def end(self) -> None: ...

    def serve(self, version: int) -> None: ...


def settings(tmp_path: Path, **overrides: str) -> params.Params:
    chosen = {"solve.task": "builtin-blending", "solve.memory_mb": "1024", "solve.log_path": str(tmp_path / "runs")}
    return params.load(tiny.ROOT / "params.yaml", {"train.environment": "modeling", **chosen, **overrides})


def played(tmp_path: Path, replies: Sequence[str], **overrides: str) -> tuple[Rollout, Scripted]:
    chosen = settings(tmp_path, **overrides)
    policy: Any = Scripted(replies)
    with Benchmark(chosen.solve, chosen.sandbox, chosen.grade) as benchmark, Background() as background:
        (competition, *_), _ = tasks_of(chosen, benchmark)
        environment = ModelingEnvironment(chosen, [competition])
        try:
            episodes = Episodes(
                policy,
                lambda messages: range(sum(len(message["content"].split()) for message in messages)),
                lambda ids: replies[ids[0]],
                environment,
                background,
                chosen.train.model_copy(update={"max_prompt_tokens": 10**6}),
            )
            (rollout,) = episodes.play([example_of(competition, "engineering")], 0)
        finally:
            background.run(environment.close())
    return rollout, policy


def test_a_policy_learns_from_what_it_wrote_itself_in_each_turn(tmp_path: Path) -> None:
    rollout, policy = played(tmp_path, [GOOD, CONCLUSION])
    assert [turn.text for turn in rollout.turns] == [GOOD, CONCLUSION]
    assert [turn.completion_ids for turn in rollout.turns] == [(0,), (1,)]
    assert [turn.mask for turn in rollout.turns] == [(1,), (1,)]
    assert [len(turn.prompt_ids) for turn in rollout.turns] == policy.prompts
    assert policy.prompts[1] > policy.prompts[0]
    assert (rollout.sample.score, rollout.sample.valid, rollout.sample.failure) == (1.0, True, None)
    assert [event.kind for event in rollout.events] == ["turn", "chat", "sandbox", "turn", "chat"]


@pytest.mark.parametrize(
    ("replies", "earned"),
    [
        ([CONCLUSION], 0.0),
        ([experiment("print(1)"), CONCLUSION], 0.0),
        ([experiment(solvers.BLENDING + "\n1 / 0"), CONCLUSION], 0.0),
        ([experiment("import harness\nopen(harness.inputs['submission'], 'w').write('nonsense')"), CONCLUSION], 0.3),
        (
            [experiment("import harness, shutil\nshutil.copy('sample_submission.csv', harness.inputs['submission'])")],
            0.5,
        ),
        ([GOOD, CONCLUSION], 1.5),
    ],
)
def test_what_an_episode_earns(tmp_path: Path, replies: list[str], earned: float) -> None:
    rollout, _ = played(tmp_path, [*replies, CONCLUSION])
    assert rollout.sample.score == pytest.approx(earned / 1.5)


def test_nobody_waits_for_an_agent_that_is_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy writes for all that ask; one whose submission is graded asks no more."""
    import gradeflow.attempt as module

    order: list[str] = []
    graded = module.grade_csv
    monkeypatch.setattr(module, "grade_csv", lambda *given: (order.append("graded"), graded(*given))[1])
    monkeypatch.setattr(Scripted, "end", lambda _: order.append("ended"))
    played(tmp_path, [GOOD, CONCLUSION])
    assert order == ["ended", "graded"]


def test_a_conversation_that_becomes_too_long_is_graded_as_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    import gradeflow.grpo.episodes as module

    prompt_of = module._Writer._prompt

    def short(writer: Any, messages: Any) -> Any:
        if writer._found:
            raise ProviderError("a prompt has 9 tokens", cause="too_long")
        return prompt_of(writer, messages)

    monkeypatch.setattr(module._Writer, "_prompt", short)
    rollout, _ = played(tmp_path, [GOOD, CONCLUSION])
    assert [turn.text for turn in rollout.turns] == [GOOD]
    assert rollout.sample.score == 1.0


def test_a_sandbox_that_breaks_leaves_an_episode_without_a_score(tmp_path: Path, monkeypatch: Any) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        """A stand-in for a broken sandbox."""
        raise SandboxError("no room", cause="sandbox")

    monkeypatch.setattr(Sandbox, "run", broken)
    rollout, _ = played(tmp_path, [GOOD, CONCLUSION])
    assert (rollout.sample.score, rollout.sample.fault) == (None, "sandbox")
    assert len(rollout.turns) == 1


def test_workspaces_go_unless_a_folder_is_to_keep_them(tmp_path: Path) -> None:
    played(tmp_path, [GOOD, CONCLUSION])
    assert not (tmp_path / "runs").exists()
    played(tmp_path, [GOOD, CONCLUSION], **{"train.tasks.workspaces": str(tmp_path / "kept")})
    assert [path.name for path in (tmp_path / "kept").glob("modeling_run_*/sandbox/problem.json")] == ["problem.json"]


CHANCE = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.]+(?:\+00:00)?Z?|[0-9a-f]{32}|(?<=builtin_blending_)[0-9a-f]{8}|(?<=blending_)[0-9a-f]{6}"
    r"|(?<=gradeflow-)[a-z0-9_]{8}|\"(?:duration_)?seconds\": [\d.e-]+"
)


def tree(folder: Path) -> dict[str, str]:
    """All files below a folder, with what chance and the clock made of them blanked out."""
    found: dict[str, list[str]] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            name = CHANCE.sub("#", path.relative_to(folder).as_posix())
            found.setdefault(name, []).append(CHANCE.sub("#", path.read_text().replace(str(folder), "RUNS")))
    return {name: "\n".join(sorted(texts)) for name, texts in found.items()}


def test_runner_and_training_leave_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same task and the same replies; the client's name apart, which is whose replies they are."""
    import gradeflow.grpo.modeling as module

    monkeypatch.setattr(module.PolicyClient, "model", "scripted")
    replies = [experiment("print(1)"), "no code", GOOD, CONCLUSION]
    overrides = {"solve.review": "false", "train.tasks.workspaces": str(tmp_path / "training")}
    played(tmp_path, replies, **overrides)
    chosen = settings(tmp_path, **overrides)
    solve = chosen.solve.model_copy(update={"log_path": tmp_path / "runner"})

    with Benchmark(solve, chosen.sandbox, chosen.grade) as benchmark:
        competition = benchmark.competition("builtin-blending")
        competition.prepare()
        attempts.attempted(chosen.model_copy(update={"solve": solve}), competition, replies)
    training, runner = tree(tmp_path / "training"), tree(tmp_path / "runner")
    assert training.keys() == runner.keys()
    lengths = re.compile(r'"(?:(?:prompt|completion|total)_tokens|parameters|payload|data_dir|log_path)": [^,}]+')
    for name, text in runner.items():
        assert lengths.sub("", training[name]).replace("/training", "/runner") == lengths.sub("", text), name


def test_tasks_are_parted_and_named_by_what_an_agent_is_given(tmp_path: Path) -> None:
    chosen = settings(tmp_path, **{"solve.task": "", "train.tasks.limit": "10"})
    with Benchmark(chosen.solve, chosen.sandbox, chosen.grade) as benchmark:
        found, split = tasks_of(chosen, benchmark)
        train, validation = datasets(found, split, "engineering")
        (again, _) = datasets(found, split, "engineering")
        other: list[Competition] = [replace(one, description="Another one.") for one in found]
        (changed, _) = datasets(other, split, "engineering")
    assert (len(train.examples), len(validation.examples)) == (8, 2)
    assert not {one.id for one in train.examples} & {one.id for one in validation.examples}
    assert {one.kind for one in train.examples} == {"task"}
    assert train.md5 == again.md5 != changed.md5
    assert len(train.md5) == 32


@pytest.mark.slow
def test_a_policy_learns_to_work_as_an_agent(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four kinds of experiment that it writes by chance, those that leave a submission which scores."""
    monkeypatch.chdir(tmp_path)
    small = {"base.vocabulary": "900", "base.hidden_size": "64", "base.layers": "2"}
    chosen = settings(
        tmp_path,
        **small,
        **{
            "base.model": str(tmp_path / "base"),
            "solve.benchmark": "mle",
            "solve.task": "",
            "solve.max_turns": "1",
            "train.tasks.limit": "5",
            "train.max_steps": "10",
            "train.eval_every": "5",
            "train.prompts_per_step": "2",
            "train.group_size": "8",
            "train.learning_rate": "5.0e-3",
            "train.warmup_steps": "1",
            "train.kl_coef": "0.0",
            "train.max_prompt_tokens": "4096",
            "train.max_completion_tokens": "160",
            "train.temperature": "0.7",
            "train.temperature_end": "0.7",
            "tracking.experiment": tmp_path.name,
        },
    )
    with Benchmark(chosen.solve, chosen.sandbox, chosen.grade) as benchmark:
        found, _ = tasks_of(chosen, benchmark)
        agents.make(tmp_path / "base", agents.lessons(found, chosen.solve, 60), chosen.base, 450)
    train_grpo.main(chosen)
    run = tracking.newest_run("train_grpo")
    assert run is not None
    rewards = [point.value for point in tracking.read_history(run, "train/avg_reward")]
    validated = [point.value for point in tracking.read_history(run, "val_accuracy")]
    print(json.dumps({"rewards": rewards, "validation": validated}))
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert validated[-1] > validated[0] + 0.3
