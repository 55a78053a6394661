"""A base with its adapter that answers chats; questions that wait at the same time share a batch."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradeflow import adapter
from gradeflow.errors import SetupError
from gradeflow.prompt import Message

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

MAX_BATCH = 32
COLDEST = 0.01  # below it a temperature is greedy: logits divided by less overflow


class PromptError(ValueError):
    """The messages cannot be put to this model; the asker is told why."""


@dataclass(frozen=True, slots=True)
class Question:
    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...] = ()

    @property
    def batch(self) -> tuple[object, ...]:
        """Questions of one batch share their sampling; a seeded one is drawn alone, whoever else asks."""
        if self.temperature < COLDEST:
            return ("greedy",)
        return ("sampled", self.temperature, self.top_p) if self.seed is None else ("seeded", id(self))


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass(slots=True, eq=False)
class _Waiting:
    question: Question
    answer: "asyncio.Future[Answer]"


class Chat:
    """Belongs to one event loop. The model works in a thread, on one batch after the other."""

    def __init__(self, model: "PeftModel", tokenizer: "PreTrainedTokenizerBase") -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.context = int(model.config.max_position_embeddings)
        self._waiting: list[_Waiting] = []
        self._work: asyncio.Task[None] | None = None

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The messages as the model reads them.

        Raises:
            PromptError: the chat template takes no such messages, or they leave no room for an answer.
        """
        import jinja2

        chat = [{"role": message["role"], "content": message["content"]} for message in messages]
        try:
            text: Any = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise PromptError(f"these messages do not fit the model's chat template: {error}") from None
        tokens = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(tokens) >= self.context:
            raise PromptError(
                f"the messages are {len(tokens)} tokens long; the model takes {self.context} with its answer"
            )
        return tokens

    async def ask(self, question: Question) -> Answer:
        waiting = _Waiting(question, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._answer_all())
        return await waiting.answer

    async def _answer_all(self) -> None:
        while batch := self._next_batch():
            try:
                answers = await asyncio.to_thread(self.generate, [one.question for one in batch])
            except Exception as error:  # noqa: BLE001 - whatever broke, those who wait must hear of it
                for one in batch:
                    if not one.answer.done():
                        one.answer.set_exception(error)
            else:
                for one, answer in zip(batch, answers, strict=True):
                    if not one.answer.done():
                        one.answer.set_result(answer)

    def _next_batch(self) -> list[_Waiting]:
        """The first that waits and those like it; who has gone away meanwhile is left out."""
        self._waiting = [one for one in self._waiting if not one.answer.done()]
        alike = [one for one in self._waiting if one.question.batch == self._waiting[0].question.batch][:MAX_BATCH]
        self._waiting = [one for one in self._waiting if one not in alike]
        return alike

    def generate(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers to questions of one `batch`."""
        import torch

        first = questions[0]
        with torch.inference_mode(), torch.random.fork_rng(enabled=first.seed is not None):
            if first.seed is not None:
                torch.manual_seed(first.seed)
            rows = self._complete(questions)
        return [self._answer(question, row) for question, row in zip(questions, rows, strict=True)]

    def _complete(self, questions: Sequence[Question]) -> "list[list[int]]":
        import torch
        from transformers import GenerationConfig

        first = questions[0]
        width = max(len(question.tokens) for question in questions)
        gaps = [width - len(question.tokens) for question in questions]
        pad = self._pad
        prompts = [[pad] * gap + list(question.tokens) for gap, question in zip(gaps, questions, strict=True)]
        mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
        sampled: dict[str, Any] = {"do_sample": False}
        if first.temperature >= COLDEST:
            sampled = {"do_sample": True, "temperature": first.temperature, "top_p": first.top_p, "top_k": 0}
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max(question.max_tokens for question in questions),
            eos_token_id=sorted(self._ends),
            pad_token_id=pad,
            repetition_penalty=1.0,
            **sampled,
        )
        made: torch.Tensor = self.model.generate(
            input_ids=torch.tensor(prompts, device=self.model.device),
            attention_mask=torch.tensor(mask, device=self.model.device),
            generation_config=settings,
        )
        return [list(row) for row in made[:, width:].tolist()]

    @property
    def _ends(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return {int(end) for end in [*ends, self.tokenizer.eos_token_id] if end is not None}

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if isinstance(pad, int) else min(self._ends, default=0))

    def _answer(self, question: Question, row: Sequence[int]) -> Answer:
        within = row[: question.max_tokens]
        end = next((at for at, token in enumerate(within) if token in self._ends), None)
        tokens = within if end is None else within[:end]
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        cut = min((at for stop in question.stop if (at := text.find(stop)) >= 0), default=None)
        return Answer(
            text=text[:cut],
            prompt_tokens=len(question.tokens),
            completion_tokens=len(tokens) + (end is not None),
            finish_reason="length" if end is None and cut is None else "stop",
        )


def load(base: str, revision: str, folder: Path) -> Chat:
    """The base with the adapter in `folder` on it.

    Raises:
        SetupError: the base is not here, or not whole.
        AdapterError: on this base the adapter changes nothing.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pinned: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(base, **pinned)
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", **pinned)
    except OSError as error:
        raise SetupError(f"base {base}: cannot be loaded: {str(error).splitlines()[0]}") from error
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    adapter.prove_alive(adapted, adapter.default_probes(int(model.config.vocab_size)))
    return Chat(adapted, tokenizer)
