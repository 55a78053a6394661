"""Question, reference, answer -> a verdict. A judge that decides nothing is a JudgeError, never a False."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gradeflow import prompt
from gradeflow.errors import JudgeError
from gradeflow.llm import ChatClient, Reply
from gradeflow.prompt import Message

SYSTEM = "You are a precise answer equivalence evaluator."
RETRY_TEMPERATURE = 0.7
LAST_WORDS = 200

_MARKERS = re.compile(r"<(?:\s*<){2,}|>(?:\s*>){2,}")
_LABEL = re.compile(r"true[\s_-]*false", re.IGNORECASE)
_WORD = r"\s*(true|false)\b(?!\s*(?:or\b|[/|]))"
_LABELLED = (
    re.compile(rf"<true_false>{_WORD}\W*</true_false>", re.IGNORECASE),
    re.compile(rf"<true_false>\s*:{_WORD}", re.IGNORECASE),
    re.compile(rf"\*\*true_false\*\*\s*:{_WORD}", re.IGNORECASE),
    re.compile(rf"true_false\s*:{_WORD}", re.IGNORECASE),
)
_EITHER = re.compile(r"\b(true|false)\b", re.IGNORECASE)
_LAST = re.compile(r"\b(True|False)\b[\s.!*`_)\]}>\"']*\Z")
_DOUBT = re.compile(
    r"\b(?:not|no|nor|neither|never|none|cannot|without|hardly|unclear|unsure|if|whether|wrong|incorrect)\b"
    r"|n\Wt\b",
    re.IGNORECASE,
)
_ANALYSIS = re.compile(r"<analysis>(.*?)(?:</analysis>|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Verdict:
    correct: bool
    reason: str
    model: str
    prompt_version: str


class Judge:
    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self.model = client.model
        self.prompt_version = prompt.load("judge").version

    async def verdict(self, question: str, reference: str, answer: str) -> Verdict:
        """Whether answer and reference mean the same. A reply that does not say so is asked for once more.

        Raises:
            JudgeError: neither reply held a verdict.
            ProviderError: there was no reply.
        """
        asked = messages(question, reference, answer)
        reply = await self._client.chat(asked)
        correct = parse(reply, (question, reference, answer))
        if correct is None:
            room = 2 * reply.completion_tokens if reply.finish_reason == "length" else None
            reply = await self._client.chat(asked, temperature=RETRY_TEMPERATURE, seed=1, max_tokens=room)
            correct = parse(reply, (question, reference, answer))
        if correct is None:
            said = " ".join(reply.text.split())[:120]
            raise JudgeError(f"judge {self.model} gave no verdict in two replies: {said!r}", cause="no_verdict")
        return Verdict(correct, _reason(reply.text), reply.model, self.prompt_version)


def messages(question: str, reference: str, answer: str) -> list[Message]:
    """What a judge reads. The values are data: nothing in them ends their quotes or looks like a verdict."""
    values = {"question": question, "reference": reference, "answer": answer}
    quoted = {name: _quoted(value) for name, value in values.items()}
    asked = prompt.load("judge").render(**quoted)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]


def parse(reply: Reply, values: Iterable[str] = ()) -> bool | None:
    """The verdict of a reply to a question about `values`; None where it has none, or contradicts itself."""
    finished = reply.finish_reason == "stop"
    for form in _LABELLED if finished else _LABELLED[:1]:
        if said := {found[1].lower() for found in form.finditer(reply.text)}:
            return said == {"true"} if len(said) == 1 else None
    if not finished or any(_EITHER.search(value) for value in values):
        return None
    return _last_word(reply.text)


def _last_word(text: str) -> bool | None:
    """The word that ends a reply, if it is the only one and its sentence does not turn it round."""
    last = _LAST.search(text)
    words = {word.lower() for word in _EITHER.findall(text)}
    if last is None or len(words) > 1 or _LABEL.search(text):
        return None
    sentence = re.split(r"[.!?\n]\s", text[: last.start()][-LAST_WORDS:])[-1]
    return None if _DOUBT.search(sentence) else last[1] == "True"


def _quoted(value: str) -> str:
    return _LABEL.sub("verdict", _MARKERS.sub(lambda found: found[0][0] * 2, value))


def _reason(text: str) -> str:
    found = _ANALYSIS.search(text)
    return " ".join((found[1] if found else text).split())[:500]
