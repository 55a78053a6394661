"""A base with its adapters that answers chats; questions to one adapter that wait at the same time share a batch."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradeflow import adapter, models
from gradeflow.errors import SetupError
from gradeflow.prompt import Message

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_BATCH = 32
MAX_TOP = 20
"""Most alternatives of a token, as with OpenAI."""
COLDEST = 0.01  # below it a temperature is greedy: logits divided by less overflow


class PromptError(ValueError):
    """The messages cannot be put to this model; the asker is told why."""


@dataclass(frozen=True, slots=True)
class Question:
    """`top` is how many alternatives are told of each token; None: no log-probabilities at all."""

    adapter: str
    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...] = ()
    top: int | None = None

    @property
    def batch(self) -> tuple[object, ...]:
        """Questions of one batch share adapter and sampling; a seeded one is drawn alone, whoever else asks."""
        if self.temperature < COLDEST:
            return (self.adapter, "greedy")
        sampled = (self.adapter, "sampled", self.temperature, self.top_p)
        return sampled if self.seed is None else ("seeded", id(self))


@dataclass(frozen=True, slots=True)
class Token:
    """A token that was drawn, its log-probability before any temperature, and the likeliest ones in its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: Literal["stop", "length"]
    tokens: tuple[Token, ...] | None = None


Told = Callable[[str], None]
"""Is given the text so far, each time that there is more of it."""


@dataclass(slots=True, eq=False)
class _Waiting:
    question: Question
    answer: "asyncio.Future[Answer]"
    told: Told | None = None
    tokens: list[int] = field(default_factory=list)


class Chat:
    """Belongs to one event loop. All that the model does happens in one thread, one batch after the other."""

    def __init__(self, model: "PreTrainedModel | PeftModel", tokenizer: "PreTrainedTokenizerBase") -> None:
        self.model: Any = model
        self.tokenizer = tokenizer
        self.context = int(model.config.max_position_embeddings)
        self._adapters: dict[str, str] = {}
        self._waiting: list[_Waiting] = []
        self._work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat")

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def attach(self, name: str, folder: Path) -> None:
        """Load an adapter, which from then on answers under this name."""
        from peft import PeftModel

        inner = f"adapter_{len(self._adapters)}_{abs(hash(name))}"  # PEFT makes modules of these names
        if isinstance(self.model, PeftModel):
            self.model.load_adapter(str(folder), inner)
        else:
            self.model = PeftModel.from_pretrained(self.model, str(folder), inner)
        self.model.eval()
        self._adapters[name] = inner

    def detach(self, name: str) -> None:
        self.model.delete_adapter(self._adapters.pop(name))

    def log_probabilities(self, name: str, probes: Sequence[Sequence[int]]) -> list[float]:
        """Of each token of the probes but the first, by an adapter, or by the base where no name is given."""
        import torch

        tokens = torch.tensor([list(probe) for probe in probes], device=self.model.device)
        with torch.inference_mode():
            if name or not self._adapters:
                self._choose(name)
                logits = self.model(input_ids=tokens).logits
            else:
                with self.model.disable_adapter():
                    logits = self.model(input_ids=tokens).logits
        return adapter.log_probabilities(logits.float(), probes)

    def _choose(self, name: str) -> None:
        if name:
            self.model.set_adapter(self._adapters[name])

    async def alone(self, work: Callable[[], Any]) -> Any:
        """Do something with the model between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

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

    async def ask(self, question: Question, told: Told | None = None) -> Answer:
        waiting = _Waiting(question, asyncio.get_running_loop().create_future(), told)
        self._waiting.append(waiting)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._answer_all())
        return await waiting.answer

    async def _answer_all(self) -> None:
        while batch := self._next_batch():
            try:
                answers = await self.alone(partial(self._generate, batch, asyncio.get_running_loop()))
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

    def _generate(self, batch: Sequence[_Waiting], loop: asyncio.AbstractEventLoop) -> list[Answer]:
        def told(row: Sequence[int]) -> None:
            for one, token in zip(batch, row, strict=True):
                if one.told and len(one.tokens) < one.question.max_tokens and not self._ends & set(one.tokens):
                    one.tokens.append(token)
                    loop.call_soon_threadsafe(one.told, self._settled(one.question, one.tokens))

        return self.generate(
            [one.question for one in batch],
            told if any(one.told for one in batch) else None,
            lambda at: batch[at].answer.done(),
        )

    def generate(
        self,
        questions: Sequence[Question],
        told: Callable[[Sequence[int]], None] | None = None,
        is_gone: Callable[[int], bool] = lambda _: False,
    ) -> list[Answer]:
        """Answers to questions of one `batch`; `told` is given each step's tokens, one of each question.

        A question ends at a stop, or when whoever asked it `is_gone`, by its place in the batch.
        """
        import torch

        first = questions[0]
        self._choose(first.adapter)
        with torch.inference_mode(), torch.random.fork_rng(enabled=first.seed is not None):
            if first.seed is not None:
                torch.manual_seed(first.seed)
            rows, likely = self._complete(questions, told, is_gone)
        return [
            self._answer(question, row, likely.of(at, row, self.tokenizer, question.top or 0) if likely else None)
            for at, (question, row) in enumerate(zip(questions, rows, strict=True))
        ]

    def _complete(
        self,
        questions: Sequence[Question],
        told: Callable[[Sequence[int]], None] | None,
        is_gone: Callable[[int], bool],
    ) -> "tuple[list[list[int]], _Likely | None]":
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
        likely = _Likely() if any(question.top is not None for question in questions) else None
        made: torch.Tensor = self.model.generate(
            input_ids=torch.tensor(prompts, device=self.model.device),
            attention_mask=torch.tensor(mask, device=self.model.device),
            generation_config=settings,
            logits_processor=[likely] if likely else None,
            streamer=_Steps(told) if told else None,
            stopping_criteria=[self._ended(questions, width, is_gone)],
        )
        if likely:
            likely.end(made)
        return [list(row) for row in made[:, width:].tolist()], likely

    def _ended(
        self, questions: Sequence[Question], width: int, is_gone: Callable[[int], bool]
    ) -> "Callable[..., torch.Tensor]":
        """Which rows need no more tokens, as transformers asks after each step."""
        import torch

        def ended(tokens: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
            found = [
                is_gone(at) or bool(one.stop and _stopped(one, self._text(tokens[at, width:].tolist())) is not None)
                for at, one in enumerate(questions)
            ]
            return torch.tensor(found, device=tokens.device)

        return ended

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def _ends(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return {int(end) for end in [*ends, self.tokenizer.eos_token_id] if end is not None}

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if isinstance(pad, int) else min(self._ends, default=0))

    def _answer(self, question: Question, row: Sequence[int], told: Sequence[Token] | None) -> Answer:
        within = row[: question.max_tokens]
        end = next((at for at, token in enumerate(within) if token in self._ends), None)
        tokens = within if end is None else within[:end]
        text = self._text(tokens)
        cut = _stopped(question, text)
        if cut is not None:  # the token that completed the stop is the last
            last = next(at for at in range(len(tokens)) if self._stops(question, tokens, at))
            tokens = tokens[: last + 1]
            text, end = self._text(tokens), None
            cut = _stopped(question, text)
        return Answer(
            text=text[:cut],
            prompt_tokens=len(question.tokens),
            completion_tokens=len(tokens) + (end is not None),
            finish_reason="length" if end is None and cut is None else "stop",
            tokens=tuple(told[: len(tokens)]) if told is not None and question.top is not None else None,
        )

    def _stops(self, question: Question, tokens: Sequence[int], at: int) -> bool:
        return _stopped(question, self._text(tokens[: at + 1])) is not None

    def _settled(self, question: Question, tokens: Sequence[int]) -> str:
        """The text so far, less what more tokens might change: half a character, half of a stop."""
        end = next((at for at, token in enumerate(tokens) if token in self._ends), len(tokens))
        text = self._text(tokens[:end])
        if (cut := _stopped(question, text)) is not None:
            return text[:cut]
        text = text.rstrip("\ufffd")
        return text[: len(text) - max((len(stop) - 1 for stop in question.stop), default=0)] if question.stop else text


def _stopped(question: Question, text: str) -> int | None:
    return min((at for stop in question.stop if (at := text.find(stop)) >= 0), default=None)


class _Steps:
    """A streamer as transformers' `generate` calls it, for any number of rows."""

    def __init__(self, told: Callable[[Sequence[int]], None]) -> None:
        self._told = told
        self._is_prompt = True

    def put(self, tokens: "torch.Tensor") -> None:
        if not self._is_prompt:
            self._told(tokens.tolist())
        self._is_prompt = False

    def end(self) -> None:
        pass


class _Likely:
    """A logits processor that changes nothing and keeps what each drawn token's log-probability was."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None
        self._drawn: list[torch.Tensor] = []
        self._top: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, tokens: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        self.end(tokens)
        self._last = scores.float().log_softmax(-1)
        values, places = self._last.topk(min(MAX_TOP, scores.shape[-1]))
        self._top.append((values, places))
        return scores

    def end(self, tokens: "torch.Tensor") -> None:
        """The last of these tokens were drawn from what was last seen."""
        if self._last is not None:
            self._drawn.append(self._last.gather(-1, tokens[:, -1:])[:, 0])
        self._last = None

    def of(self, at: int, row: Sequence[int], tokenizer: Any, count: int) -> list[Token]:
        return [
            Token(
                tokenizer.decode([token]),
                float(drawn[at]),
                tuple(
                    (tokenizer.decode([place]), value)
                    for place, value in zip(places[at, :count].tolist(), values[at, :count].tolist(), strict=True)
                ),
            )
            for token, drawn, (values, places) in zip(row, self._drawn, self._top, strict=False)
        ]


def load(base: str, revision: str) -> Chat:
    """The base, without any adapter.

    Raises:
        SetupError: it is not here, or not whole.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pinned: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(base, **pinned)
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", **pinned)
    except OSError as error:
        raise SetupError(f"base {base}: cannot be loaded: {str(error).splitlines()[0]}") from error
    return Chat(model.to(models.device()).eval(), tokenizer)
