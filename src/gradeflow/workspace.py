"""The folders of one agent run, and its telemetry.

    <base>/modeling_run_<task>_<8 hex digits>/
        sandbox/              where the agent's code runs; public files are copied into it
        artifacts/telemetry/  what happened, as JSON Lines and run_metadata.json
        logs/ state/
        candidates/           submissions, taken out of the sandbox

Only `sandbox/` may be shown to the agent's code. Nothing that is written here holds a secret that was named.
"""

import contextlib
import json
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from gradeflow.errors import DataError
from gradeflow.prompt import Message
from gradeflow.redact import redact

SCHEMA_VERSION = "gradeflow-telemetry/1"
LONGEST_ID = 100
RULE = "=" * 80

Record = Literal["conversation", "llm_calls", "sandbox_runs", "experiment_reviews", "grade_reports"]


def timestamp(seconds: float | None = None) -> str:
    """A moment, now by default, as UTC with Z; `seconds` counts from the epoch."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def submission_name(task_id: str, suffix: str = ".csv") -> str:
    return f"submission_{_safe(task_id, keep='-_')}_{uuid.uuid4().hex[:6]}{suffix}"


def _safe(task_id: str, keep: str = "") -> str:
    return re.sub(f"[^A-Za-z0-9{re.escape(keep)}]", "_", task_id)[:LONGEST_ID]


class Workspace:
    def __init__(self, base: Path, task_id: str, *, secrets: Collection[str] = ()) -> None:
        self.run_dir = base.absolute() / f"modeling_run_{_safe(task_id)}_{uuid.uuid4().hex[:8]}"
        self.sandbox = self.run_dir / "sandbox"
        self.artifacts = self.run_dir / "artifacts"
        self.telemetry = self.artifacts / "telemetry"
        self.candidates = self.run_dir / "candidates"
        self._secrets = tuple(secrets)
        with _writing(self.run_dir):
            self.run_dir.mkdir(parents=True)
            for folder in (
                self.sandbox,
                self.telemetry,
                self.run_dir / "logs",
                self.run_dir / "state",
                self.candidates,
            ):
                folder.mkdir(parents=True)

    @property
    def run_name(self) -> str:
        return self.run_dir.name

    def copy_public(self, public_dir: Path) -> None:
        """Copy a task's public files into the sandbox.

        Raises:
            DataError: there is no such folder, or it holds a link, which could lead to private files.
        """
        if not public_dir.is_dir():
            raise DataError(f"{public_dir}: no such folder of public files")
        for source in sorted(_walk(public_dir)):
            target = self.sandbox / source.relative_to(public_dir)
            with _writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target, follow_symlinks=False)

    def record(self, name: Record, row: Mapping[str, Any]) -> None:
        """Append one line to a telemetry file; a file ends without a line break."""
        path = self.telemetry / f"{name}.jsonl"
        line = json.dumps(redact(row, self._secrets), ensure_ascii=False, default=str)
        with (
            _writing(path),
            path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
        ):
            file.write(f"\n{line}" if file.tell() else line)

    def write_metadata(self, metadata: Mapping[str, Any]) -> None:
        path = self.telemetry / "run_metadata.json"
        text = json.dumps(
            redact({"schema_version": SCHEMA_VERSION} | dict(metadata), self._secrets), indent=2, default=str
        )
        part = path.with_suffix(".part")
        with _writing(path):
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(path)

    def write_conversation(self, messages: Sequence[Message]) -> None:
        """What was said, as summary.json, and as summary_readable.txt for a reader."""
        said: Any = redact(list(messages), self._secrets)
        readable = "".join(f"=== {one['role'].upper()} ===\n{one['content']}\n\n{RULE}\n\n" for one in said)
        texts = {"summary.json": json.dumps(said, indent=2, ensure_ascii=False), "summary_readable.txt": readable}
        for name, text in texts.items():
            path = self.artifacts / name
            with _writing(path):
                path.write_text(text, encoding="utf-8", errors="backslashreplace")

    def keep_script(self, code: str) -> Path:
        """Keep a copy of the agent's code beside the telemetry."""
        folder = self.artifacts / "sandbox_scripts"
        path = folder / f"_sandbox_script_{uuid.uuid4().hex}.py"
        with _writing(path):
            folder.mkdir(exist_ok=True)
            path.write_text(redact(code, self._secrets), encoding="utf-8", errors="backslashreplace")
        return path

    def keep_candidate(self, name: str, content: bytes) -> Path:
        """Keep a submission out of the sandbox's reach; the latest of a name is kept."""
        path = self.candidates / name
        with _writing(path):
            path.write_bytes(content)
        return path


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        mode = entry.lstat().st_mode
        if stat.S_ISDIR(mode):
            yield from _walk(entry)
        elif stat.S_ISREG(mode):
            yield entry
        else:
            kind = "a link" if stat.S_ISLNK(mode) else "no plain file"
            raise DataError(f"{entry}: {kind}; public data must be plain files, for the agent is given copies")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None
