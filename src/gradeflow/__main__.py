"""The command line: `gradeflow COMMAND [inputs] [--section.setting VALUE ...]`."""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from gradeflow import disk
from gradeflow.errors import GradeflowError, SettingsError

# What the user's disk or permissions are to blame for; any other OSError is a bug, and shows where.
OF_THE_MACHINE = disk.FULL | {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EIO,
}


@dataclass(frozen=True, slots=True)
class Input:
    """What a command is run on. `path`, `int` and `flag` inputs become such values; no default means required."""

    name: str
    help: str
    default: Any = ...
    kind: str = "text"
    positional: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    module: str
    help: str
    sections: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    more: str = ""
    short: Mapping[str, str] = field(default_factory=dict)
    """Flags that stand for settings, as the original systems' users type them."""


FOLDERS = {"benchmark": "solve.benchmark", "data_dir": "solve.data_dir", "tasks_dir": "solve.tasks_dir"}
COMMANDS: dict[str, Command] = {
    "fetch": Command(
        "fetch",
        "one dataset, in the format it is published in (dvc repro runs it)",
        ("fetch",),
        (
            Input("dataset", "name under fetch in params.yaml", positional=True),
            Input("out", "JSONL to write", kind="path"),
        ),
    ),
    "mix": Command(
        "mix",
        "datasets into training, validation and test sets (dvc repro runs it)",
        ("mix",),
        (
            Input("raw", "folder with what fetch wrote", kind="path"),
            Input("out", "folder to write", kind="path"),
        ),
    ),
    "import": Command(
        "commands.import_mixed",
        "rows that the original mixed (train_mixed.jsonl, val_mixed.jsonl), as rows of our own",
        (),
        (
            Input("file", "the original's mixed file", kind="path", positional=True),
            Input("out", "JSONL to write, such as data/original/train.jsonl", kind="path"),
        ),
        more="""\
Name what it wrote under fetch, and `imported` in mix.weights:

  fetch:
    imported: {files: {train: data/original/train.jsonl, validation: data/original/val.jsonl}}

A row that lacks what graders need is set aside, and counted by what it lacks: HotpotQA without its context, choices
that are empty, MBPP without tests. The datasets themselves have these: name them under fetch in params.yaml.

AFlow's own files need no import: fetch reads them where params.yaml names them,

  fetch:
    mbpp: {files: {validation: data/datasets/mbpp_validate.jsonl, test: data/datasets/mbpp_test.jsonl}}

and likewise for gsm8k, math, hotpotqa, drop and humaneval. Its DS_public_test.jsonl have tests without questions and
are not needed: public tests are read from the problem.""",
    ),
    "base": Command(
        "base",
        "the base model: the embedded one is made here",
        ("base", "models", "workflow", "judge", "scorer", "sandbox"),
    ),
    "train_grpo": Command(
        "train_grpo",
        "a LoRA adapter by GRPO: the policy writes workflows or works on modeling tasks, and is graded",
        ("train", "solve", "base", "models", "workflow", "judge", "scorer", "sandbox"),
        (Input("preset", "settings for modeling tasks: fast, standard or advanced; empty: none", ""),),
        more="""\
  gradeflow train_grpo                                             workflows, on data/mixed
  gradeflow train_grpo --preset fast --benchmark engineering --split engineering_mini --data-root data

With train.environment=modeling the policy is the agent of `gradeflow solve`, over several turns, on the tasks of
solve.benchmark: a part of them is kept for validation. A submission that an experiment leaves earns 0.3, a valid one
0.2 more, and its score, from 0 to 1, as much again; experiments that leave nothing cost 0.1. A score here is that
reward over the 1.5 that can be earned. A preset sets what the original's did; what is typed counts before it.""",
        short={
            "benchmark": "solve.benchmark",
            "data_root": "solve.data_dir",
            "competitions": "solve.task",
            "max_turns": "solve.max_turns",
            "sandbox_timeout": "solve.sandbox_timeout_s",
            "split": "train.tasks.split",
            "task_limit": "train.tasks.limit",
            "val_ratio": "train.tasks.val_ratio",
            "min_train_tasks": "train.tasks.min_train",
            "workspace_dir": "train.tasks.workspaces",
            "train_temperature": "train.temperature",
            "seed": "train.seed",
            "model_path": "base.model",
        },
    ),
    "evaluate": Command(
        "evaluate",
        "base and adapters with lm-evaluation-harness, on equal terms",
        ("evaluate", "base", "models", "workflow", "judge", "scorer", "sandbox"),
        (
            Input("adapter", "folders, run ids or models:/NAME@ALIAS, by commas; empty: the newest training run's", ""),
            Input("tasks", "names of lm-eval or YAML files, by commas, in place of evaluate.tasks", ""),
            Input("quick", "10 questions per task", default=False, kind="flag"),
            Input("rescore", "evaluation run, or folder with its files, whose saved replies are scored again", ""),
        ),
        more="""\
  gradeflow evaluate                                      the newest adapter, on evaluate.tasks
  gradeflow evaluate --tasks gsm8k,arc_easy --quick       lm-eval's tasks, 10 questions each
  gradeflow evaluate --adapter first,second,models:/gradeflow-policy@champion
  gradeflow evaluate --adapter base --tasks mmlu          the base alone
  gradeflow evaluate --rescore RUN --tasks gsm8k          its replies, by today's metrics: no model is loaded

All subjects share one loaded base. Before it is loaded, adapters, tasks, memory and settings are looked at. Replies
are kept in evaluate.cache: an evaluation that ran out of time (status 124) goes on with the same command, and no reply
is generated twice. Tasks are lm-eval's (`lm-eval ls tasks`), groups and tags too, `math` for hendrycks_math, and
`workflow`, where adapters write workflows as in training. Generated code (humaneval, mbpp) runs in the sandbox, once
evaluate.confirm_run_unsafe_code allows it. Without the hub, evaluate.data names files: {openai/gsm8k: data/gsm8k}.

--rescore is for a metric, filter, target or scorer that has changed: prompts and questions have to be the same, and a
reply that is missing is an error, never a 0. Of workflows it scores the answers, without writing or running them again.

The MLflow run has a metric TASK/METRIC with its standard error for the adapter and base/TASK/METRIC for the base,
results.json, lm-eval's own files and samples, and a table of the questions that base or adapter alone has right.""",
    ),
    "promote": Command(
        "promote",
        "the adapter to champion, if a paired test says so",
        ("promote",),
        (
            Input("evaluation", "evaluation run; empty: the newest", ""),
            Input("dry_run", "say what would be decided, change nothing", default=False, kind="flag"),
            Input("force", "make it champion whatever the gate says; needs --reason", default=False, kind="flag"),
            Input("reason", "why it is forced; it stays with the champion", ""),
        ),
        more="""\
  gradeflow promote --dry-run
  gradeflow promote --evaluation RUN --promote.targets [workflow,gsm8k] --promote.guards '{humaneval: 0.02}'
  gradeflow promote --force --reason "the old champion leaks its prompt"

The challenger is the best adapter of the evaluation; the rival the champion, or the base where there is none. On one
of the targets it must gain: at least promote.minimum_effect, by a one-sided paired test over the same questions
(McNemar's exact one for right and wrong, else a paired bootstrap), corrected for all targets and adapters that could
have been chosen instead. On the other targets and the guards a loss of the margin must be ruled out, which takes
questions: the table says how many there are. Both must have been measured alike, the adapter be alive and of the same
base, and its training data free of held-out questions.

What is decided is a run with all figures, a plot, and the answers that flipped. `gradeflow history` lists champions,
`gradeflow rollback` puts the one before back.""",
    ),
    "rollback": Command(
        "commands.rollback",
        "the champion before, or another version, to champion",
        ("promote", "tracking"),
        (
            Input("to", "version that becomes champion; 0: the champion before", 0, kind="int"),
            Input("reason", "why; it stays in the history", ""),
        ),
        more="""\
  gradeflow rollback --reason "answers in French"
  gradeflow rollback --to 3

A rollback is a move like a promotion: a run, and a line in `gradeflow history`. The next challenger is compared with
the version that is put back.""",
    ),
    "verify": Command(
        "commands.verify",
        "whether what a registered adapter rests on still holds, link by link",
        ("promote", "tracking"),
        (Input("model", "models:/NAME@ALIAS or models:/NAME/3; empty: the champion", "", positional=True),),
        more="""\
  gradeflow verify
  gradeflow verify models:/gradeflow-policy@champion

The chain: alias, history, version, adapter files, base, training run, git commit, the mixed data that dvc.lock named,
evaluation with scorer and judge, the samples, the gate's own decision, made again. Every digest is computed anew. It
needs no network, and works in a copy of the project.

  ok   it holds
  BAD  it does not. The exit status is then 1
  -    there is nothing here to look at""",
    ),
    "leaderboard": Command(
        "commands.leaderboard",
        "registered versions and runs, ranked by a metric, with its interval",
        ("promote", "tracking"),
        (
            Input(
                "metric", "such as workflow/accuracy, gsm8k/exact_match or solve/any_medal_rate", "workflow/accuracy"
            ),
            Input("lower", "whether less is better", default=False, kind="flag"),
            Input("count", "rows to print", 20, kind="int"),
        ),
        more="""\
  gradeflow leaderboard
  gradeflow leaderboard --metric gsm8k/exact_match
  gradeflow leaderboard --metric train/kl_div --lower

From Python, gradeflow.commands.leaderboard.frame gives a pandas frame. The interval is of 95 %: that of the metric
itself where it was logged with bounds or a standard error. For which of two is better, ask `gradeflow promote`, which
compares them question by question.""",
    ),
    "history": Command(
        "commands.history",
        "the champions, with dates, digests and why",
        ("promote", "tracking"),
    ),
    "serve": Command("serve", "a registered adapter behind an OpenAI-compatible API", ("serve", "base")),
    "solve": Command(
        "solve",
        "modeling tasks: an agent experiments, submits and is graded",
        ("solve", "models", "sandbox"),
        (
            Input("task", "competition ids; none: those of solve.task, or all of the benchmark", (), "list"),
            Input("dataset_file", "list of competition ids, one a line or as JSON Lines; empty: none", ""),
            Input("llm_model", "model to ask, such as openai/gpt-4o-mini; empty: LLM_MODEL, else solve.model", ""),
            Input("llm_provider", "who serves it, such as openai; empty: LLM_PROVIDER, or as its name says", ""),
            Input("scripted", "JSON list of replies that stand in for the model, or a list for each task's id", ""),
        ),
        more="""\
  gradeflow solve --task builtin-blending --scripted replies.json    a built-in task, without a model
  gradeflow solve --benchmark mathmodeling --data-dir data --task mathmodeling-0 mathmodeling-1
  gradeflow solve --benchmark mle --data-dir data --parallel 8 --solve.seeds 3 --llm-model openai/gpt-4o-mini

The agent gets copies of a task's public files, runs its experiments in the sandbox, and submits what an experiment
that ended without an error leaves. What is graded is a copy out of its reach. Several tasks are an MLflow run with one
below it for each, and a table of scores and medals; the same command goes on where it was interrupted, and tries
again what had no score for a fault of provider, sandbox or grader. Such a task has an error, and never a score of 0.

Below solve.log_path lie <workflow>_on_<benchmark>/ with the results as CSV, and a workspace of each task with its
telemetry. API_KEY and API_BASE of the environment count with --llm-model or LLM_MODEL, as in the original runner.""",
        short={
            "workflow": "solve.workflow",
            **FOLDERS,
            "log_path": "solve.log_path",
            "parallel": "solve.parallel",
        },
    ),
    "grade": Command(
        "commands.grade",
        "submissions against a benchmark's own graders",
        ("grade", "solve", "sandbox"),
        (
            Input(
                "submission",
                "file, folder of files, or JSONL of competition_id and submission_path",
                kind="path",
                positional=True,
            ),
            Input("task", "competition id, for a file, or for all files of a folder", ""),
            Input("mode", "test or validation: which of the prepared data is graded against", "test"),
            Input("out", "folder that the report is written to", ".", kind="path"),
        ),
        more="""\
  gradeflow grade --benchmark engineering --data-dir data/engineering-bench --task industry-0 submission.csv
  gradeflow grade --benchmark mle --data-dir ~/.cache/mle-bench/data submissions.jsonl
  gradeflow grade --benchmark mathmodeling --data-dir data/mathmodeling-bench runs/benchmark_results

Tasks of DeepModeling and of MLE-bench are read as they are. What came of preparing their data is in the data folder,
or in `competitions` in it:  ID/prepared/public  ID/prepared/private. How they are graded, config.yaml and grade.py, is
looked for in benchmarks/<package>/competitions or <package>/competitions of a folder above it, then in the same folder,
then in an installed mlebench; --solve.tasks_dir names it. Neither mlebench nor `benchmarks` has to be installed.

In a folder a file is for the task that it is named after: ID.csv, submission_ID_<6 hex digits>.csv (as solve leaves
them) or ID/submission.csv. Others are left. A line of JSONL is {"competition_id": ..., "submission_path": ...}.

Graders run in a sandbox: without the network, with the limits under `grade`. A submission that its grader refuses is
invalid and has no score. A grader that crashes, or takes too long, has not graded: that is told apart, under
`faults`, and the exit status is 1.

{timestamp}_grading_report.json has MLE-bench's fields: total_runs, total_valid_submissions, total_medals, ... and
competition_reports.""",
        short=FOLDERS,
    ),
    "prepare": Command(
        "commands.prepare",
        "a competition's public and private files from its raw data, by its own preparer",
        ("grade", "solve", "sandbox"),
        (
            Input("task", "competition ids, by commas; empty: all", ""),
            Input("dataset_file", "file that lists competition ids, in place of --task", ""),
            Input("mode", "test, or prepare and validation for the preparer's validation split", "test"),
        ),
        more="""\
  gradeflow prepare --benchmark engineering --data-dir data/engineering-bench --task industry-0,industry-1
  gradeflow prepare --benchmark mathmodeling --data-dir data/mathmodeling-bench --dataset-file config.yaml

Raw data is ID/raw in the data folder; ID/prepared/public and ID/prepared/private are made from it. The preparer runs
in a sandbox, without the network, and cannot change the raw data. A task that is prepared is left as it is.

Answers stay out of public files: what a problem says under a name such as expected_answer is taken out, and a public
file that is the answers, or has every row of them, is refused. A list of tasks is a configuration with
engineering_competitions (and so on) or competitions, JSONL with competition_id, or an id on each line.""",
        short=FOLDERS,
    ),
    "chain": Command("commands.chain", "base, train_grpo, evaluate, promote, serve: what `mlflow run .` runs"),
    "doctor": Command(
        "commands.doctor",
        "what this machine has for a run, what is missing, and what to do about it",
        ("sandbox", "tracking"),
        more="""\
One line each: Python and what is installed; vLLM's environment; which layer isolates model-written code, and how to
get the others; the tracking store; the models, where they are not local; the base model; disk and memory.

  ok   there, and good
  BAD  needed and missing: what follows the arrow mends it. The exit status is then 1
  -    a run can do without it, or is weaker by it

Nothing is changed but what a stage would change too: the store and its experiment are made. To try another setting:
gradeflow doctor --sandbox.isolation landlock --models.base.url http://127.0.0.1:8002/v1""",
    ),
    "data": Command(
        "commands.data",
        "the mixed datasets: `data show` counts rows by source, type and split, and prints some",
        (),
        (
            Input("action", "show", positional=True),
            Input("split", "whose rows are printed: train, validation or test", "train"),
            Input("source", "only rows of this dataset", ""),
            Input("count", "rows to print", 3, kind="int"),
            Input("seed", "of their choice", 0, kind="int"),
        ),
    ),
    "audit": Command(
        "commands.audit",
        "what grades can be relied on: `audit judge` asks the judge what is known, `audit tasks` tries modeling tasks",
        ("judge", "models", "solve", "grade", "sandbox"),
        (
            Input("action", "judge or tasks", positional=True),
            Input("count", "questions of each kind, for the judge", 30, kind="int"),
            Input("seed", "of the choice of questions and of wrong answers", 0, kind="int"),
            Input("task", "competition ids; none: all there are", (), kind="list"),
        ),
        more="""\
  gradeflow audit judge --count 50
  gradeflow audit tasks --benchmark all
  gradeflow audit tasks --benchmark mathmodeling --data-dir data/mathmodeling-bench --task mamo-ode-0 mamo-ode-1

The judge. The questions are held-out ones of data/mixed. To each the judge is shown a right and a wrong answer; both
again amid many neutral words, in the reference's place, and twice with sampling. Canaries are what no judge may call
right: ":", "Solution", empty markdown, imitations of a verdict, instructions to the judge, the question itself.

  kappa                      agreement with the labels beyond chance: 1 is all, 0 is chance (Cohen)
  false positives            wrong answers called right, with 95 % bounds: what a policy learns to exploit
  false negatives            right answers called wrong: reward that is lost
  position, length, repeat   how often a verdict stays as it is when the places are exchanged, words are added, or the
                             judge is asked again at temperature 0.7
  no verdict                 replies that say neither; faults of the server are counted apart. Neither is a verdict

Free text is what the judge decides. It is not asked about numbers and choices, which have verifiers, unless
judge.audit_share shows it some in training; until then these decide nothing here. The exit status is 1 where a canary
passes, where the lower bound of the false positives is above judge.max_false_positives, and where more cases than
train.max_fault_share have no verdict. Replies kept from earlier runs do not count. The MLflow run has the cases, the
figures and a plot.

Tasks. Graders are only asked to grade, so those of others are audited as ours are.

  files       a task whose files are missing or cannot be read
  gold        the gold submission, or the answers, score less than the leaderboard's best
  sample      the untouched sample submission wins a medal, or scores as the gold submission does
  empty       so does an empty file, a header without rows, or rows without answers
  parses      the grader cannot read its own answer, such as "No Best Solution" or 1.2e-5
  tolerance   errors are accepted that are more than the description allows, or refused that are less; or an answer
              below 1 in size is allowed an absolute error
  leak        a public file, its name, a column or the order of rows tells the answers
  duplicate   the question of another task, word for word or but for case, spaces and signs
  grader      the grader crashes on a gold, sample or empty submission

The exit status is 1 where anything is wrong. Tasks that do not tell right work from wrong, or need none, are unusable:
they go into the file that solve.quarantine names, with why, and `gradeflow solve` and training skip them. A tolerance
that is wider than stated is told and does not make a task unusable. The MLflow run has a table of all tasks.""",
        short=FOLDERS,
    ),
    "watch": Command(
        "commands.watch",
        "how a training run is doing, live in the terminal: `watch`, or `watch RUN`",
        ("tracking",),
        (
            Input(
                "run", "id or name of a train_grpo run, or a part of its name; empty: the newest", "", positional=True
            ),
            Input("once", "print it once and end, as where the output is no terminal", default=False, kind="flag"),
        ),
        more="""\
  gradeflow watch                  the newest training run, until it ends; Ctrl-C ends watch, not the run
  gradeflow watch 3f2a91c0         the one of that name, running or not
  gradeflow watch --once           as it is now, as plain text

All of it is read from MLflow, so that a run on another machine can be watched: tracking.uri names the server. What is
shown is the mean of the newest 20 steps, and beside it the course of the whole run, from left to right.

  unscored         rollouts without a score for a fault: they count neither right nor wrong
  valid            workflows that were right as written
  dead groups      groups without two different scores, from which nothing is learnt
  validation       accuracy of greedy workflows on held-out questions; the best checkpoint by it is the result
  nothing new ...  the run has no end and logs nothing: it was killed, or hangs, or its server was away. The command
                   that started it goes on from the last checkpoint""",
    ),
    "profile": Command(
        "commands.profile",
        "settings for real hardware: `profile list`, `profile use NAME`, `profile import FILE [FILE]`",
        (),
        (
            Input("action", "list, use or import", positional=True),
            Input(
                "names",
                "profile name, or the original's training.yaml and aflow_llm.yaml",
                kind="list",
                positional=True,
            ),
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; errors that a user can act on end in one line and a status other than 0."""
    try:
        run(list(sys.argv[1:] if argv is None else argv))
    except GradeflowError as error:
        fail(str(error), error.status)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on where it was", 130)
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            raise
        fail(f"{error.filename or Path.cwd()}: {disk.said(error)}; nothing was put in place of a good file", 1)


def fail(message: str, status: int) -> None:
    print(f"gradeflow: {message}", file=sys.stderr)
    sys.exit(status)


def run(argv: list[str]) -> None:
    if not argv or argv[0] in {"-h", "--help"}:
        print(overview())
        return
    if argv[0] == "--version":
        from importlib.metadata import version

        print(version("gradeflow"))
        return
    name, *rest = argv
    if name not in COMMANDS:
        raise SettingsError(f"{name}: no such command; there are: {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    if {"-h", "--help"} & set(rest):
        print(explain(name, command))
        return
    inputs, overrides, path = parse(name, command, rest)

    from gradeflow import params, presets

    settings = params.load(path, {**presets.overrides(inputs.pop("preset", "")), **overrides})
    stage: Callable[..., None] = importlib.import_module(f"gradeflow.{command.module}").main
    stage(settings, **inputs)
    if name == "train_grpo" and settings.evaluate.after_training:
        importlib.import_module("gradeflow.evaluate").main(settings)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self.prog}: {message}. See: {self.prog} --help")


def parse(name: str, command: Command, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str], Path]:
    """Split what was typed into a command's inputs, dotted settings, and the path of params.yaml."""
    parser = Parser(prog=f"gradeflow {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    types: dict[str, type] = {"path": Path, "int": int}
    for given in command.inputs:
        options: dict[str, Any] = {"type": types[given.kind]} if given.kind in types else {}
        if given.kind == "list":
            options["nargs"] = "*"
        if given.kind == "flag":
            options = {"action": "store_true"}
        elif not given.positional:
            options |= {"required": True} if given.default is ... else {"default": given.default}
        elif given.default is not ...:
            options |= {"nargs": "?", "default": given.default}
        flags = [given.name] if given.positional else [f"--{given.name}", f"--{given.name.replace('_', '-')}"]
        parser.add_argument(*dict.fromkeys(flags), **options)
    typed, dotted = _dotted(list(argv), command.short)
    known, unknown = parser.parse_known_args(typed)
    if unknown:
        raise SettingsError(f"{name}: {unknown[0]}: not an input of this command. See: gradeflow {name} --help")
    values = vars(known)
    return values, dotted, values.pop("params")


def _dotted(argv: list[str], short: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    typed, dotted = [], {}
    while argv:
        word = argv.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        key = short.get(key.replace("-", "_"), key)
        if not word.startswith("--") or "." not in key:
            typed.append(word)
        elif equals:
            dotted[key] = value
        elif argv:
            dotted[key] = argv.pop(0)
        else:
            raise SettingsError(f"{word}: a value is missing")
    return typed, dotted


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: gradeflow COMMAND [inputs] [--section.setting VALUE ...]",
            "",
            "Teach LoRA adapters with graded work: data -> base -> train_grpo -> evaluate -> promote -> serve.",
            "",
            *lines,
            "",
            "`gradeflow COMMAND --help` lists a command's inputs and settings. Settings live in params.yaml; one given",
            "here holds for this run only: gradeflow train_grpo --train.learning_rate 1e-5",
            "",
            "Exit status: 0 done; 1 an error, which the last line names; 2 a setting or an input is wrong; 75 a model",
            "does not answer, or too much has no score: the same command goes on later; 130 interrupted.",
        ]
    )


def explain(name: str, command: Command) -> str:
    """The help of one command, made from the schema and the values in params.yaml."""
    from gradeflow import params

    lines = [f"usage: gradeflow {name} [inputs] [--section.setting VALUE ...]", "", command.help, ""]
    if command.more:
        lines += [command.more, ""]
    if command.inputs:
        lines += ["inputs:", *(_input_line(given) for given in command.inputs), ""]
    lines += [f"  --{name.replace('_', '-')}  short for --{dotted}" for name, dotted in command.short.items()]
    lines += ["  --params PATH  another params.yaml", ""]
    try:
        current = params.load().model_dump(mode="json")
    except SettingsError:
        current = {}
    for section in command.sections:
        lines.append(f"{section}:")
        if params.is_map(section):
            fields = params.section(section).model_fields.items()
            lines += [f"  --{section}.NAME.{key}  {info.description}" for key, info in fields]
            continue
        for dotted, info in params.settings(params.section(section), section):
            value: Any = current
            for key in dotted.split("."):
                value = value.get(key, "") if isinstance(value, dict) else ""
            lines.append(f"  --{dotted} {params.type_name(info.annotation)}  {info.description} [{value}]")
    return "\n".join(lines)


def _input_line(given: Input) -> str:
    label = given.name if given.positional else f"--{given.name}"
    default = " (required)" if given.default is ... else f" [{given.default}]" if given.kind == "int" else ""
    return f"  {label}  {given.help}{default}"


if __name__ == "__main__":
    main()
