"""The modeling agent: what it is asked, what runs, what counts."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gradeflow import agent, params
from gradeflow.agent import Episode, experiment_code, extract_tag_content, observe, shorten
from gradeflow.benchmarks import TaskDefinition
from gradeflow.errors import DataError, ProviderError
from gradeflow.handlers import handler_of
from gradeflow.llm import ScriptedClient
from gradeflow.prompt import Message
from gradeflow.sandbox import Execution, Sandbox
from gradeflow.workspace import Workspace

SETTINGS = params.load(Path(__file__).parents[1] / "params.yaml")
CONCLUDE = "<Conclusion>done</Conclusion>"
Replies = Sequence[str | Exception] | Callable[[Sequence[Message]], str]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "runs", "toy-1")


@pytest.fixture
def task(tmp_path: Path) -> TaskDefinition:
    private = tmp_path / "toy-1" / "prepared" / "private"
    public = tmp_path / "toy-1" / "prepared" / "public"
    private.mkdir(parents=True)
    public.mkdir()
    (private / "answer.csv").write_text("the answer is 42")
    (public / "problem.json").write_text('{"en_question": "How much?"}')
    payload = {
        "description": "Find {x}.",
        "public_data_dir": str(public),
        "output_submission_path": str(tmp_path / "submission_toy-1_abc123.csv"),
    }
    return TaskDefinition("toy-1", "kaggle", payload)


def experiment(code: str) -> str:
    return f"<Hypothesis>h</Hypothesis>\n<Experiment>\n```python\n{code}\n```\n</Experiment>"


def write(text: str) -> str:
    return f"open('submission_toy-1_abc123.csv', 'w').write({text!r})"


def solved(
    task: TaskDefinition, workspace: Workspace, replies: Replies, max_turns: int = 3, *, review: bool = False
) -> Episode:
    changes = {"max_turns": max_turns, "review": review, "memory_mb": 1024, "sandbox_timeout_s": 20.0}
    settings = SETTINGS.solve.model_copy(update=changes)

    async def run() -> Episode:
        sandbox = Sandbox(SETTINGS.sandbox)
        try:
            with handler_of(task) as handler:
                given = handler.prepare_input(task)
                return await agent.solve(given, workspace, ScriptedClient(replies), sandbox, settings)
        finally:
            await sandbox.close()

    return asyncio.run(run())


def lines(workspace: Workspace, name: str) -> list[dict]:
    text = (workspace.telemetry / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")]


def test_an_experiment_that_ends_well_and_leaves_a_file_is_a_success(
    task: TaskDefinition, workspace: Workspace
) -> None:
    episode = solved(task, workspace, [experiment(write("id,answer\n") + "\nprint('wrote it')"), CONCLUDE])
    assert (episode.success, episode.turns, episode.experiments) == (True, 2, 1)
    assert episode.submission is not None
    assert episode.submission.read_text() == "id,answer\n"
    assert workspace.sandbox not in episode.submission.parents
    assert "Execution succeeded.\nwrote it\n" in episode.messages[2]["content"]


def test_the_first_message_names_the_files_and_the_submission(task: TaskDefinition, workspace: Workspace) -> None:
    first = solved(task, workspace, [CONCLUDE]).messages[0]["content"]
    for fact in ("Find {x}.", "problem.json", "`./submission_toy-1_abc123.csv`", "3 experiments"):
        assert fact in first
    assert task.payload["public_data_dir"] not in first


def test_a_conclusion_without_an_experiment_earns_nothing(task: TaskDefinition, workspace: Workspace) -> None:
    episode = solved(task, workspace, [CONCLUDE])
    assert (episode.success, episode.submission, episode.turns, episode.experiments) == (False, None, 1, 0)


def test_an_experiment_beside_a_conclusion_is_not_run(task: TaskDefinition, workspace: Workspace) -> None:
    episode = solved(task, workspace, [experiment(write("x")) + CONCLUDE])
    assert (episode.success, episode.experiments) == (False, 0)
    assert not (workspace.sandbox / "submission_toy-1_abc123.csv").exists()


def test_a_crash_after_the_file_is_written_is_no_success(task: TaskDefinition, workspace: Workspace) -> None:
    episode = solved(task, workspace, [experiment(write("x") + "\nraise RuntimeError('too late')"), CONCLUDE])
    assert (workspace.sandbox / "submission_toy-1_abc123.csv").read_text() == "x"
    assert (episode.success, episode.submission) == (False, None)
    assert "RuntimeError: " in episode.messages[2]["content"]


def test_a_crash_does_not_replace_what_an_earlier_experiment_submitted(
    task: TaskDefinition, workspace: Workspace
) -> None:
    replies = [experiment(write("good")), experiment(write("half") + "\n1 / 0"), CONCLUDE]
    episode = solved(task, workspace, replies)
    assert episode.submission is not None
    assert episode.submission.read_text() == "good"


def test_the_last_submission_counts(task: TaskDefinition, workspace: Workspace) -> None:
    episode = solved(task, workspace, [experiment(write("first")), experiment(write("second")), CONCLUDE])
    assert episode.submission is not None
    assert episode.submission.read_text() == "second"


def test_an_experiment_without_a_file_is_no_success_and_says_so(task: TaskDefinition, workspace: Workspace) -> None:
    episode = solved(task, workspace, [experiment("print(6 * 7)"), CONCLUDE])
    assert not episode.success
    assert "There is no submission in ./submission_toy-1_abc123.csv" in episode.messages[2]["content"]


@pytest.mark.parametrize("make", ["os.symlink('problem.json', name)", "os.mkfifo(name)", "os.mkdir(name)"])
def test_what_is_no_plain_file_is_no_submission(task: TaskDefinition, workspace: Workspace, make: str) -> None:
    code = f"import os, harness\nname = harness.inputs['submission']\n{make}"
    assert not solved(task, workspace, [experiment(code), CONCLUDE]).success


def test_the_private_answer_is_out_of_reach(task: TaskDefinition, workspace: Workspace, tmp_path: Path) -> None:
    code = f"""
import os
seen = [os.path.join(place, name) for place, _, names in os.walk({str(tmp_path)!r}) for name in names]
near = os.path.join(os.path.dirname(os.path.realpath('problem.json')), '..', 'private', 'answer.csv')
far = {str(tmp_path / "toy-1/prepared/private/answer.csv")!r}
print('found', seen, os.path.exists(near), os.path.exists(far))
try:
    import gradeflow
    print('the grader can be imported')
except ImportError:
    print('no grader')
"""
    observation = solved(task, workspace, [experiment(code), CONCLUDE]).messages[2]["content"]
    assert "found [] False False\nno grader" in observation


def test_files_stay_from_one_experiment_to_the_next(task: TaskDefinition, workspace: Workspace) -> None:
    replies = [
        experiment("open('kept.txt', 'w').write('7')"),
        experiment("print(open('kept.txt').read())"),
        CONCLUDE,
    ]
    assert "Execution succeeded.\n7\n" in solved(task, workspace, replies).messages[4]["content"]


def test_a_reply_without_code_is_told_so_and_costs_a_turn(task: TaskDefinition, workspace: Workspace) -> None:
    episode = solved(task, workspace, ["Let me think.", experiment(write("x")), CONCLUDE])
    assert (episode.turns, episode.success) == (3, True)
    assert "nothing was run" in episode.messages[2]["content"]


def test_experiments_end_and_one_reply_is_left_to_conclude(task: TaskDefinition, workspace: Workspace) -> None:
    episode = solved(task, workspace, [experiment(write(str(number))) for number in range(9)], max_turns=2)
    assert (episode.turns, episode.experiments) == (3, 2)
    assert "Conclusion" in episode.messages[4]["content"]
    assert episode.submission is not None
    assert episode.submission.read_text() == "1"


def test_a_provider_that_breaks_down_is_a_fault_and_no_turn(task: TaskDefinition, workspace: Workspace) -> None:
    replies = [experiment(write("x")), ProviderError("no connection", cause="connection")]
    with pytest.raises(ProviderError):
        solved(task, workspace, replies)
    events = [row["event"] for row in lines(workspace, "conversation")]
    assert events == ["llm_call", "llm_response", "observation", "llm_call"]


def test_links_among_the_public_files_stop_the_run(task: TaskDefinition, workspace: Workspace) -> None:
    (Path(task.payload["public_data_dir"]) / "hint.csv").symlink_to("../private/answer.csv")
    with pytest.raises(DataError, match=r"hint.csv: a link"):
        solved(task, workspace, [CONCLUDE])


def test_a_question_is_answered_in_a_file(workspace: Workspace) -> None:
    asked = TaskDefinition("toy-2", "qa", {"question": "How much is {6} times 7?"})
    replies = [experiment("print(open('problem.txt').read())\nopen('answer.txt', 'w').write('42')"), CONCLUDE]
    episode = solved(asked, workspace, replies)
    assert "How much is {6} times 7?" in episode.messages[0]["content"]
    assert "Execution succeeded.\nHow much is {6} times 7?\n" in episode.messages[2]["content"]
    assert episode.submission is not None
    assert episode.submission.read_text() == "42"


def reviewed(**changes: object) -> str:
    done = {"is_buggy": False, "summary": "s", "completion_state": "complete", "quality_score": 0.7}
    return f"Here it is: {json.dumps(done | {'should_continue': False} | changes)}"


def test_a_review_that_finds_the_work_done_ends_it(task: TaskDefinition, workspace: Workspace) -> None:
    replies = [experiment(write("first")), reviewed(), experiment(write("second"))]
    episode = solved(task, workspace, replies, review=True)
    assert (episode.turns, episode.experiments) == (2, 1)
    assert "last experiment" in episode.messages[2]["content"]
    assert episode.submission is not None
    assert episode.submission.read_text() == "first"
    (row,) = lines(workspace, "experiment_reviews")
    assert (row["iteration"], row["finalized"], row["review"]["summary"]) == (1, True, "s")
    assert row["experiment_code"] == write("first") + "\n"
    assert row["observation"].startswith("<Observation>")
    assert [event.kind for event in episode.events] == ["turn", "chat", "sandbox", "chat", "turn", "chat"]


@pytest.mark.parametrize(
    "reply",
    [
        reviewed(is_buggy=True),
        reviewed(should_continue=True),
        reviewed(quality_score=0.69),
        reviewed(completion_state="in_progress"),
        reviewed(completion_state="partial", thoroughness_score=0.59),
        reviewed(quality_score=7),
        "It looks fine to me.",
        "",
    ],
)
def test_any_other_review_does_not(task: TaskDefinition, workspace: Workspace, reply: str) -> None:
    episode = solved(task, workspace, [experiment(write("x")), reply, CONCLUDE], review=True)
    assert "2 left" in episode.messages[2]["content"]
    assert [row["finalized"] for row in lines(workspace, "experiment_reviews")] == [False]


def test_partial_work_that_is_thorough_is_done(task: TaskDefinition, workspace: Workspace) -> None:
    reply = reviewed(completion_state="partial", thoroughness_score=0.6)
    assert (
        "last experiment"
        in solved(task, workspace, [experiment(write("x")), reply, CONCLUDE], review=True).messages[2]["content"]
    )


def test_work_without_a_submission_is_not_done_whatever_a_review_says(
    task: TaskDefinition, workspace: Workspace
) -> None:
    replies = [experiment("print(1)"), reviewed(), experiment(write("x")), reviewed(), CONCLUDE]
    assert solved(task, workspace, replies, review=True).success


def test_after_the_last_experiment_there_is_no_review(task: TaskDefinition, workspace: Workspace) -> None:
    solved(task, workspace, [experiment(write("x")), CONCLUDE], max_turns=1, review=True)
    assert not (workspace.telemetry / "experiment_reviews.jsonl").exists()


def test_the_conversation_is_written_as_events(task: TaskDefinition, workspace: Workspace) -> None:
    solved(task, workspace, [experiment("print('seen')"), CONCLUDE])
    rows = lines(workspace, "conversation")
    shapes = [(row["event"], row["turn"], sorted(row["payload"])) for row in rows]
    assert shapes == [
        ("llm_call", 1, ["max_tokens", "messages", "temperature"]),
        ("llm_response", 1, ["content"]),
        ("observation", 1, ["content", "execution_success"]),
        ("llm_call", 2, ["max_tokens", "messages", "temperature"]),
        ("llm_response", 2, ["content"]),
    ]
    assert rows[2]["payload"] == {
        "execution_success": True,
        "content": "<Observation>\nExecution succeeded.\nseen\n</Observation>",
    }
    assert all(row["timestamp"].endswith("Z") for row in rows)
    assert [message["role"] for message in rows[3]["payload"]["messages"]] == ["user", "assistant", "user"]


def test_calls_and_sandbox_runs_have_a_row_each(task: TaskDefinition, workspace: Workspace) -> None:
    solved(task, workspace, [experiment("1 / 0"), CONCLUDE])
    calls, (ran,) = lines(workspace, "llm_calls"), lines(workspace, "sandbox_runs")
    assert [call["response"] for call in calls][1:] == [CONCLUDE]
    assert set(calls[0]["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert (ran["success"], ran["exc_type"], ran["code"]) == (False, "ZeroDivisionError", "1 / 0\n")
    assert Path(ran["copied_script_path"]).read_text() == "1 / 0\n"


def test_events_of_a_turn_lie_below_it(task: TaskDefinition, workspace: Workspace) -> None:
    episode = solved(task, workspace, [experiment("print(1)"), CONCLUDE])
    assert [(event.kind, event.parent) for event in episode.events] == [
        ("turn", None),
        ("chat", 0),
        ("sandbox", 0),
        ("turn", None),
        ("chat", 3),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<Model> a\nb </Model>", "a\nb"),
        ("<Model>first</Model><Model>second</Model>", "first"),
        ("<Model>open", None),
        ("<model>other</model>", None),
        ("<Model></Model>", ""),
    ],
)
def test_a_tag_holds_what_its_first_pair_encloses(text: str, found: str | None) -> None:
    assert extract_tag_content(text, "Model") == found


@pytest.mark.parametrize(
    "inside",
    [
        "print(1)",
        "```python\nprint(1)\n```",
        "```\nprint(1)\n```",
        "Here is the script:\n\n```python\nprint(1)\n```\nIt prints.",
        "```python\nprint(1)",
    ],
)
def test_code_is_freed_of_its_fences(inside: str) -> None:
    code = experiment_code(f"<Experiment>{inside}</Experiment>")
    assert code is not None
    assert code.strip() == "print(1)"


def test_backquotes_inside_a_line_of_code_stay() -> None:
    assert experiment_code("<Experiment>print('```')</Experiment>") == "print('```')"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "print(1)",
        "<Experiment></Experiment>",
        "<Experiment>print(1)",
        "<Experiment>\n```\n```</Experiment>",
    ],
)
def test_no_code_is_no_experiment(text: str) -> None:
    assert experiment_code(text) is None


@pytest.mark.parametrize(
    ("count", "told"), [(1, "a"), (2, "a\na"), (3, "a (repeated 3 times)"), (99, "a (repeated 99 times)")]
)
def test_equal_lines_in_a_row_are_told_once(count: int, told: str) -> None:
    assert shorten("x\n" + "a\n" * count + "y") == f"x\n{told}\ny"


def test_long_output_keeps_its_head_and_tail_and_fits() -> None:
    text = "\n".join(str(number) for number in range(20_000))
    short = shorten(text)
    assert len(short) == 16_000
    assert short.startswith("0\n1\n")
    assert short.endswith("19998\n19999")
    assert "characters left out" in short
    assert shorten(short) == short


@pytest.mark.parametrize(
    ("status", "limit", "head"),
    [("ok", None, "succeeded"), ("failed", None, "failed"), ("limit", "wall", "stopped at a limit")],
)
def test_the_model_is_told_how_its_code_ended(status: str, limit: str | None, head: str) -> None:
    error = "" if status == "ok" else "why"
    ended = Execution(status, None, "out\n", "err\n", None, error, limit, 0.1)
    assert observe(ended).splitlines()[1].endswith(f"{head}.")
    assert ("why" in observe(ended)) == (status != "ok")
    assert "out\nerr" in observe(ended)
