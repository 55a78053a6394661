"""Task handlers: what an agent is given for a task of each type, and what its output becomes.

with handler_of(task) as handler:
description, io_instructions, data_dir, output_path = handler.prepare_input(task)
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from gradeflow import data_report
from gradeflow.benchmarks import TaskDefinition, TaskType

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff"})
ARRAYS = frozenset({".npy", ".npz"})
NO_OUTPUT = "[ERROR] Agent did not produce an answer file."


class TaskInput(NamedTuple):
    """`output_path` names the submission; the agent writes a file of that name into its working folder."""

    description: str
    io_instructions: str
    data_dir: Path
    output_path: Path


class TaskHandler:
    """Subclasses say which payload keys they need. A handler may have a folder of its own, which `cleanup` removes."""

    task_type: TaskType
    needs: tuple[str, ...]

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()

    def prepare_input(self, task: TaskDefinition) -> TaskInput:
        """What the agent is given.

        Raises:
            ValueError: a task of another type, or one without what this type needs.
            FileNotFoundError: there is no folder of public data.
        """
        if task.task_type != self.task_type:
            raise ValueError(f"{task.task_id}: a task of type {task.task_type}; expected {self.task_type}")
        if missing := [name for name in self.needs if not task.payload.get(name)]:
            raise ValueError(f"{task.task_id}: the payload of a {self.task_type} task lacks {', '.join(missing)}")
        return self._input(task.payload)

    def _input(self, payload: Mapping[str, Any]) -> TaskInput:
        raise NotImplementedError

    def parse_output(self, output_path: Path) -> Any:
        """The file itself, be it there or not."""
        return output_path

    def cleanup(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _write(self, text: str, instruction: str, output: str) -> TaskInput:
        """A task whose only file is the problem."""
        self._folder = tempfile.TemporaryDirectory(prefix="gradeflow-task-")
        folder = Path(self._folder.name)
        public = folder / "public"
        public.mkdir()
        (public / "problem.txt").write_text(text, encoding="utf-8")
        description = f"{text}\n\n{instruction}\n\n{data_report.report(public)}"
        return TaskInput(description, io_instructions(output), public, folder / output)


class KaggleTaskHandler(TaskHandler):
    task_type = "kaggle"
    needs = ("description", "public_data_dir", "output_submission_path")

    def _input(self, payload: Mapping[str, Any]) -> TaskInput:
        public, output = _public(payload), Path(payload["output_submission_path"])
        description = f"{payload['description']}\n\n{data_report.report(public)}"
        return TaskInput(description, io_instructions(output.name), public, output)


class TextTaskHandler(TaskHandler):
    """The output, as text, is what `parse_output` gives; where there is none, a text that begins with [ERROR]."""

    def parse_output(self, output_path: Path) -> str:
        if not output_path.is_file():
            return NO_OUTPUT
        try:
            return output_path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            return f"[ERROR] Failed to parse answer file: {error}"


class QATaskHandler(TextTaskHandler):
    task_type = "qa"
    needs = ("question",)

    def _input(self, payload: Mapping[str, Any]) -> TaskInput:
        return self._write(payload["question"], "Write the answer, and nothing else, into the file.", "answer.txt")


class CodeTaskHandler(TextTaskHandler):
    """The answer is a module; `test_cases` are for whoever grades it, and no part of what the agent sees."""

    task_type = "code"
    needs = ("prompt", "entry_point", "test_cases")

    def _input(self, payload: Mapping[str, Any]) -> TaskInput:
        asked = f"Write a Python module that defines `{payload['entry_point']}` into the file."
        return self._write(payload["prompt"], asked, "solution.py")


class ScienceTaskHandler(TaskHandler):
    """The submission may be of any format: `metadata.output_fname` and the sample submission say which."""

    task_type = "science"
    needs = ("description", "public_data_dir", "output_submission_path")

    def _input(self, payload: Mapping[str, Any]) -> TaskInput:
        public, output = _public(payload), Path(payload["output_submission_path"])
        wanted = Path(str((payload.get("metadata") or {}).get("output_fname") or "")).suffix.lower()
        if output.suffix == ".csv" and wanted == ".pkl":
            output = output.with_suffix(".pkl")
        told = "\n".join([io_instructions(output.name), *_format_notes(output.suffix.lower(), wanted)])
        description = f"{payload['description'].strip()}\n\n{data_report.report(public)}"
        return TaskInput(description, told, public, output)


HANDLERS: Mapping[TaskType, type[TaskHandler]] = {
    "kaggle": KaggleTaskHandler,
    "qa": QATaskHandler,
    "science": ScienceTaskHandler,
    "code": CodeTaskHandler,
}


def handler_of(task: TaskDefinition) -> TaskHandler:
    return HANDLERS[task.task_type]()


def io_instructions(name: str) -> str:
    """Where inputs are and where the submission goes."""
    return (
        "--- CRITICAL I/O REQUIREMENTS ---\n"
        "All input files are in your working folder `./`.\n"
        f"Write your submission to `./{name}`, and to no other place. When you have a better one, always overwrite "
        f"`./{name}`."
    )


def _public(payload: Mapping[str, Any]) -> Path:
    folder = Path(payload["public_data_dir"])
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of public files")
    return folder


def _format_notes(suffix: str, wanted: str) -> list[str]:
    if wanted in IMAGES and suffix == ".csv":
        return ["Put the image, encoded as base64, into the column `image_base64`."]
    if suffix in IMAGES:
        return ["Save a real image file under that name."]
    if suffix in ARRAYS:
        return ["Save it with `numpy.save` (.npy) or `numpy.savez` (.npz)."]
    notes = {
        ".pkl": "Save it with `to_pickle` or `pickle.dump`.",
        ".json": "It has to be valid JSON.",
        ".txt": "Plain text in UTF-8.",
    }
    return [notes[suffix]] if suffix in notes else []
