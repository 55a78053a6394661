"""Question, reference, answer -> a verdict. A judge that decides nothing is a JudgeError, never a False."""

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradeflow import digest, params, prompt
from gradeflow.errors import JudgeError, SettingsError
from gradeflow.llm import ChatClient, Reply
from gradeflow.prompt import Message
from gradeflow.trace import Trace

SYSTEM = "You are a precise answer equivalence evaluator."
RETRY_TEMPERATURE = 0.7
LAST_WORDS = 200
SCHEMA = {
    "type": "object",
    "properties": {"analysis": {"type": "string"}, "true_false": {"type": "string", "enum": ["True", "False"]}},
    "required": ["analysis", "true_false"],
    "additionalProperties": False,
}

# Settings that are told apart in the version, or that decide no verdict.
_ASIDE = {"models", "prompts", "audit_share", "max_false_positives"}
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
    """`votes` are those that stand behind it; the reason is one of theirs."""

    correct: bool
    reason: str
    model: str
    prompt_version: str
    votes: int = 1


class Judge:
    """Asks `settings.votes` times each of the models behind `clients`, and takes what most of all votes say."""

    def __init__(self, clients: Sequence[ChatClient], settings: params.Judge) -> None:
        self._clients = clients
        self.settings = settings
        self._prompts = {source: prompt_of(name) for source, name in settings.prompts.items()}
        self.model = "+".join(dict.fromkeys(client.model for client in clients))
        self.version = digest.of_json(
            {
                "models": [client.model for client in clients],
                "prompts": {source: asked.version for source, asked in self._prompts.items()},
                "settings": settings.model_dump(mode="json", exclude=_ASIDE),
                "default": prompt.load("judge").version,
            }
        )[:12]
        self.prompt_version = prompt.load("judge").version
        self.most_seeds = 2 * settings.votes  # that one verdict takes: a reply without one is asked for once more

    async def verdict(
        self,
        question: str,
        reference: str,
        answer: str,
        source: str = "",
        first_seed: int = 0,
        trace: Trace | None = None,
    ) -> Verdict:
        """Whether answer and reference mean the same; `source` names the dataset, which may have its own prompt.

        Votes are seeded one after the other; only seed 0 is asked at `judge.temperature`, all others are sampled. What
        was asked and replied is in `trace`.

        Raises:
            JudgeError: the votes that arrived settle nothing.
            ProviderError: the same, and a model gave no reply.
        """
        asked = self._prompts.get(source, prompt.load("judge"))
        model, version = self.model, asked.version
        if reason := self._unasked(reference, answer):
            return Verdict(correct=False, reason=reason, model=model, prompt_version=version, votes=0)
        values = (question, reference, answer)
        ballots = [
            (client, number)
            for client in self._clients
            for number in range(first_seed, first_seed + self.settings.votes)
        ]
        found = await asyncio.gather(
            *(self._vote(client, number, asked, values, trace or Trace()) for client, number in ballots),
            return_exceptions=True,
        )
        votes = [vote for vote in found if not isinstance(vote, BaseException)]
        for correct in (True, False):
            agreeing = [reason for vote, reason in votes if vote is correct]
            if 2 * len(agreeing) > len(ballots):
                return Verdict(correct, agreeing[0], model, version, len(agreeing))
        for fault in found:
            if isinstance(fault, BaseException):
                raise fault
        raise JudgeError(f"judge {model}: {len(votes)} votes, as many for as against", cause="tie")

    def _unasked(self, reference: str, answer: str) -> str:
        """Why an answer is wrong whatever a model would say of it: some call `:` right (arXiv 2507.08794)."""
        if len(answer) > self.settings.longest_answer:
            return f"an answer of {len(answer)} characters; judge.longest_answer is {self.settings.longest_answer}"
        if any(map(str.isalnum, reference)) and not any(map(str.isalnum, answer)):
            return "an answer without a letter or a digit"
        return ""

    async def _vote(
        self, client: ChatClient, number: int, asked: prompt.Prompt, values: tuple[str, str, str], trace: Trace
    ) -> tuple[bool, str]:
        """A reply that does not say whether they are the same is asked for once more."""
        said = messages(*values, asked)
        schema = SCHEMA if self.settings.structured else None
        temperature = RETRY_TEMPERATURE if number else self.settings.temperature
        reply = await trace.chat(client, said, temperature=temperature, seed=number or None, schema=schema)
        correct = parse(reply, values)
        if correct is None:
            room = 2 * reply.completion_tokens if reply.finish_reason == "length" else None
            again = self.settings.votes + number
            hotter = {"temperature": RETRY_TEMPERATURE, "seed": again, "max_tokens": room}
            reply = await trace.chat(client, said, **hotter, schema=schema)
            correct = parse(reply, values)
        if correct is None:
            text = " ".join(reply.text.split())[:120]
            raise JudgeError(f"judge {client.model} gave no verdict in two replies: {text!r}", cause="no_verdict")
        return correct, _reason(reply.text)


def prompt_of(file: str) -> prompt.Prompt:
    """A dataset's own prompt for the judge, by the name of its file.

    Raises:
        SettingsError: it cannot be read, or has other placeholders than question, reference and answer.
    """
    try:
        asked = prompt.Prompt(Path(file).stem, Path(file).read_text(encoding="utf-8").strip())
        asked.render(question="", reference="", answer="")
    except (OSError, UnicodeDecodeError, KeyError, IndexError, ValueError) as error:
        said = f"{file}: {error}; expected a text with {{question}}, {{reference}} and {{answer}}"
        raise SettingsError(f"judge.prompts: {said}") from None
    return asked


def messages(question: str, reference: str, answer: str, asked: prompt.Prompt | None = None) -> list[Message]:
    """What a judge reads. The values are data: nothing in them ends their quotes or looks like a verdict."""
    values = {"question": question, "reference": reference, "answer": answer}
    quoted = {name: _quoted(value) for name, value in values.items()}
    content = (asked or prompt.load("judge")).render(**quoted)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]


def parse(reply: Reply, values: Iterable[str] = ()) -> bool | None:
    """The verdict of a reply to a question about `values`; None where it has none, or contradicts itself."""
    finished = reply.finish_reason == "stop"
    if finished and reply.text.lstrip().startswith("{"):
        return _structured(reply.text)
    for form in _LABELLED if finished else _LABELLED[:1]:
        if said := {found[1].lower() for found in form.finditer(reply.text)}:
            return said == {"true"} if len(said) == 1 else None
    if not finished or any(_EITHER.search(value) for value in values):
        return None
    return _last_word(reply.text)


def _structured(text: str) -> bool | None:
    """The verdict of a reply that is one JSON object."""
    try:
        found = json.loads(text)["true_false"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return {"true": True, "false": False}.get(str(found).strip().lower())


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
    if _structured(text) is not None:
        return " ".join(str(json.loads(text).get("analysis", "")).split())[:500]
    found = _ANALYSIS.search(text)
    return " ".join((found[1] if found else text).split())[:500]
