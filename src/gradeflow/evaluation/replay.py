"""A model of lm-eval that replies what a subject has replied before, so that a task is scored again without it.

A reply counts for the document and the prompt that it was given to; both are compared. The task's target, filters and
metrics may be others by now: these are what is scored again.
"""
# ruff: noqa: ARG002, FBT001, FBT002
# (these signatures are lm-eval's)

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lm_eval.api.model import LM

from gradeflow.errors import EvaluationError
from gradeflow.evaluation import results, samples
from gradeflow.evaluation.earlier import Earlier
from gradeflow.evaluation.plan import Plan, Subject
from gradeflow.evaluation.results import Evaluation

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

END = "\0"
"""After each message of a chat, in place of the base's template."""

Document = tuple[str, int]
Said = tuple[list[Any], Any]  # what was asked, and a reply to it


class Replay(LM):  # type: ignore[misc]
    """What `subject` has replied in `task`, from the files that `plan.replies` holds."""

    def __init__(self, plan: Plan, subject: Subject, task: str) -> None:
        super().__init__()
        self._subject = subject
        self._folder = Earlier.read(Path(plan.replies)).replies(subject.name, task)
        self._before = results.read(
            self._folder, [task], base=plan.base_digest, adapter=subject.digest, with_samples=False
        )
        self._replies: dict[tuple[Document, str], Iterator[Said]] = {}

    def require_same(self, now: Evaluation) -> None:
        """Refuse results over fewer documents than were asked, or with other examples before them.

        Raises:
            EvaluationError: naming the task.
        """
        after = {leaf.task: leaf for one in now.tasks for leaf in one.leaves()}
        for before in (leaf for one in self._before.tasks for leaf in one.leaves()):
            found = after.get(before.task)
            if found is None or (found.n, found.num_fewshot) != (before.n, before.num_fewshot):
                said = f"{found.n} with {found.num_fewshot}" if found else "none"
                raise EvaluationError(
                    f"{before.task} of {self._subject.name}: {before.n} documents were asked with {before.num_fewshot} "
                    f"examples before each; by now there are {said}"
                )

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        return self._replay("generate_until", requests, str)

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._replay("loglikelihood", requests, lambda reply: (float(reply[0]), reply[1] == "True"))

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        return self._replay("loglikelihood_rolling", requests, float)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages alone: the template is the base's, which need not be here."""
        return "".join(f"{message['content']}{END}" for message in chat_history)

    @property
    def tokenizer_name(self) -> str:
        return ""

    @cached_property
    def _rows(self) -> Mapping[str, Mapping[int, samples.Row]]:
        """The saved sample of each document, by task; those of its other filters have the same replies."""
        leaves = [leaf.task for one in self._before.tasks for leaf in one.leaves()]
        return {leaf: self._by_document(samples.find(self._folder / results.NAME, leaf)) for leaf in leaves}

    def _by_document(self, file: Path) -> Mapping[int, samples.Row]:
        found: dict[int, samples.Row] = {}
        for row in samples.read(file):
            if lacking := {"arguments", "resps", "doc_hash"} - row.keys():
                raise EvaluationError(f"{file}: document {row['doc_id']} lacks {', '.join(sorted(lacking))}")
            if found.setdefault(row["doc_id"], row)["resps"] != row["resps"]:
                raise EvaluationError(f"{file}: two different replies in document {row['doc_id']}")
        return found

    def _replay(self, kind: str, requests: "Sequence[Instance]", parse: Callable[[Any], Any]) -> list[Any]:
        replies = []
        for request in requests:
            asked, reply = next(self._of(request, kind), (None, None))
            if asked is None:
                self._refuse(request, "has no such reply saved")
            if not _same(list(request.args), asked):
                self._refuse(request, "was asked otherwise: another prompt, continuation or way to generate")
            request.arguments = tuple(asked)
            try:
                replies.append(parse(reply))
            except (ValueError, TypeError, IndexError):
                self._refuse(request, f"has a reply that is none: {reply!r}")
        return replies

    def _of(self, request: "Instance", kind: str) -> Iterator[Said]:
        """The saved replies of this kind in the request's document that are left, in the order of lm-eval's asking."""
        document = (str(request.task_name), int(request.doc_id or 0))
        if (document, kind) not in self._replies:
            row = self._rows.get(document[0], {}).get(document[1])
            if row is None:
                self._refuse(request, "has no saved sample")
            if row["doc_hash"] != _hash(request.doc):
                self._refuse(request, "has changed since it was asked")
            said = zip(row["arguments"].values(), row["resps"], strict=True)
            self._replies[document, kind] = iter(
                [(list(asked.values()), reply) for asked, replies in said if _kind(asked) == kind for reply in replies]
            )
        return self._replies[document, kind]

    def _refuse(self, request: "Instance", why: str) -> NoReturn:
        raise EvaluationError(
            f"{request.task_name} of {self._subject.name}: document {request.doc_id} {why} ({self._folder})"
        )


def _hash(document: Any) -> str:
    """As lm-eval names a document in its samples."""
    from lm_eval.utils import handle_non_serializable, hash_string

    text = json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False)
    return str(hash_string(text))


def _kind(asked: Mapping[str, Any]) -> str:
    """What lm-eval has asked for: a continuation to weigh, settings to generate with, or a text alone."""
    match asked:
        case {"arg_1": str()}:
            return "loglikelihood"
        case {"arg_1": _}:
            return "generate_until"
        case _:
            return "loglikelihood_rolling"


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether this is what was asked; of a chat, whether the prompt has each message, in order."""
    (prompt, *others), (saved, *kept) = json.loads(json.dumps(now, default=str)), before
    if others != kept:
        return False
    if END not in prompt:
        return bool(prompt == saved)
    at = 0
    for message in (part.strip() for part in prompt.split(END)):
        if (found := saved.find(message, at)) < 0:
            return False
        at = found + len(message)
    return True
