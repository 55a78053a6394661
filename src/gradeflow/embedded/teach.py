"""Make the embedded base: a tokenizer and a Qwen2 model, taught the curriculum in packed sequences."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradeflow import params
from gradeflow.embedded.curriculum import Lesson
from gradeflow.embedded.induction import HEAD, ROPE_THETA, start_with_induction

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 2048
"""Longest sequence that the model is configured for."""
ROWS = (160, 352)
"""Tokens of a packed row: a lesson goes into the shortest that holds it, since attention costs by length."""
TOKENIZER_LESSONS = 4000
WARMUP = 30


@dataclass(frozen=True, slots=True)
class Progress:
    """One optimizer step: its number from 1, of how many, and the mean loss over the replies' tokens."""

    step: int
    steps: int
    loss: float


def tokenizer(lessons: Sequence[Lesson], size: int) -> "PreTrainedTokenizerFast":
    """Qwen2's tokenizer (byte-level BPE, single digits) with a vocabulary of its own, at most `size` entries."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    bpe = Qwen2Tokenizer().backend_tokenizer  # every loader of a Qwen2 model cuts text as this one does
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(
        (text for lesson in lessons for text in (*(m["content"] for m in lesson.messages), lesson.reply)),
        trainer,
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, padding_side="left", model_max_length=CONTEXT
    )
    made.chat_template = TEMPLATE
    return made


def blank_model(settings: params.Base, words: "PreTrainedTokenizerFast") -> "Qwen2ForCausalLM":
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(settings.seed)
    heads = settings.hidden_size // HEAD
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    start_with_induction(model, settings.seed)
    return model


@dataclass(frozen=True, slots=True)
class Encoded:
    """A lesson as token ids; only the reply's tokens are learnt."""

    asked: list[int]
    reply: list[int]

    def __len__(self) -> int:
        return len(self.asked) + len(self.reply)


def encode(lessons: Sequence[Lesson], words: "PreTrainedTokenizerFast") -> list[Encoded]:
    chats: list[Any] = [list(lesson.messages) for lesson in lessons]
    asked = [str(words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
    replies = [lesson.reply + END for lesson in lessons]
    encode_batch = words.backend_tokenizer.encode_batch
    pairs = zip(encode_batch(asked), encode_batch(replies), strict=True)
    return [Encoded(question.ids, reply.ids) for question, reply in pairs]


def pack(encoded: Sequence[Encoded], width: int, seed: int) -> list[list[Encoded]]:
    """Rows of at most `width` tokens, first fit in random order, so that little is padding."""
    order = [one for one in encoded if len(one) <= width]
    random.Random(seed).shuffle(order)
    rows: list[list[Encoded]] = []
    open_rows: list[tuple[int, list[Encoded]]] = []
    for one in order:
        for index, (used, row) in enumerate(open_rows):
            if used + len(one) <= width:
                row.append(one)
                open_rows[index] = (used + len(one), row)
                break
        else:
            open_rows.append((len(one), [one]))
        if len(open_rows) > 64:
            rows.append(open_rows.pop(0)[1])
    return rows + [row for _, row in open_rows]


def tensors(rows: Sequence[Sequence[Encoded]], width: int) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Token ids, positions (from 0 in each lesson, which keeps lessons apart) and labels, each (rows, width)."""
    import torch

    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for index, row in enumerate(rows):
        start = 0
        for one in row:
            end, reply = start + len(one), start + len(one.asked)
            ids[index, start:end] = torch.tensor(one.asked + one.reply)
            positions[index, start:end] = torch.arange(len(one))
            labels[index, reply - 1 : end - 1] = torch.tensor(one.reply)
            start = end
        positions[index, start:] = torch.arange(width - start)
    return ids, positions, labels


def teach(model: "Qwen2ForCausalLM", encoded: Sequence[Encoded], settings: params.Base) -> Iterator[Progress]:
    """Teach the model, a step at a time: Muon for the matrices, AdamW for the rest, a linear decay."""
    import torch
    from torch.nn.functional import cross_entropy

    batches = [
        batch
        for number in range(math.ceil(settings.passes))
        for batch in _batches(encoded, settings, settings.seed + number)
    ]
    steps = int(len(batches) * settings.passes / math.ceil(settings.passes))
    optimizers = _optimizers(model, settings.learning_rate)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    for step, (width, rows) in enumerate(batches[:steps]):
        factor = min(1.0, (step + 1) / WARMUP, (steps - step) / steps)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * factor
        ids, positions, labels = tensors(rows, width)
        hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        learnt = labels != -100
        loss = cross_entropy(model.lm_head(hidden[learnt]), labels[learnt])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield Progress(step + 1, steps, loss.item())
    model.eval()


def _batches(encoded: Sequence[Encoded], settings: params.Base, seed: int) -> list[tuple[int, list[list[Encoded]]]]:
    """Batches of packed rows of one width, some `batch_tokens` each, in random order."""
    found, shortest = [], 0
    for width in ROWS:
        rows = pack([one for one in encoded if shortest < len(one) <= width], width, seed)
        size = max(1, settings.batch_tokens // width)
        found += [(width, rows[start : start + size]) for start in range(0, len(rows) - size + 1, size)]
        shortest = width
    random.Random(seed).shuffle(found)
    return found


def _optimizers(model: "Qwen2ForCausalLM", learning_rate: float) -> "list[torch.optim.Optimizer]":
    import torch

    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    rest = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=5 * learning_rate, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
