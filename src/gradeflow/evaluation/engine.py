"""One loaded base that answers for itself and for each of its adapters, as a model of lm-eval.

Replies are kept on disk by what was asked, by whom and in which form, so the base is loaded when the first reply is
missing, and an evaluation that was broken off goes on where it was.
"""
# ruff: noqa: FBT001, FBT002
# (these signatures are lm-eval's)

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lm_eval.api.model import LM

from gradeflow import adapter, digest, models
from gradeflow.errors import AdapterError
from gradeflow.evaluation.plan import Plan, Subject

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

AT_ONCE = 512
"""Requests after which their replies are kept; lm-eval sorts so many by length."""


class Loaded(Protocol):
    """A base in memory. `choose` makes the subject answer from then on; `fingerprints` are those of chosen adapters."""

    @property
    def lm(self) -> LM: ...

    @property
    def fingerprints(self) -> dict[str, tuple[float, ...]]: ...

    def choose(self, subject: Subject) -> None: ...


class Engine(LM):  # type: ignore[misc]
    """lm-eval's model for one plan, which answers as the subject that was last named."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self._subject: Subject | None = None

    def of(self, subject: Subject) -> dict[str, Any]:
        """What `simple_evaluate` takes for this subject: the model, and where its earlier replies are kept."""
        self._subject = subject
        cache = self.plan.settings.cache
        return {"model": self, "use_cache": str(Path(cache).absolute() / self._key(subject)) if cache else None}

    def fingerprint(self, subject: Subject) -> tuple[float, ...]:
        """What an adapter does when it is loaded, which is kept beside its replies.

        Raises:
            AdapterError: nothing.
        """
        cache = self.plan.settings.cache
        kept = Path(cache) / f"{self._key(subject)}.fingerprint.json" if cache else None
        if kept and kept.is_file():
            return tuple(json.loads(kept.read_text(encoding="utf-8")))
        self._loaded.choose(subject)
        found = self._loaded.fingerprints[subject.name]
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found), encoding="utf-8")
        return found

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        return self._ask("generate_until", requests, disable_tqdm)

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._ask("loglikelihood", requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        return self._ask("loglikelihood_rolling", requests, disable_tqdm)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self._tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._tokenizer.get_chat_template() if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return self.plan.base.replace("/", "__")

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        settings = self.plan.settings
        return AutoTokenizer.from_pretrained(
            self.plan.base, revision=self.plan.revision or None, trust_remote_code=settings.trust_remote_code
        )

    @cached_property
    def _loaded(self) -> Loaded:
        return LOADERS[self.plan.backend](self.plan)

    def _ask(self, kind: str, requests: "Sequence[Instance]", disable_tqdm: bool) -> list[Any]:
        assert self._subject is not None
        self._loaded.choose(self._subject)
        longest_first = sorted(range(len(requests)), key=lambda at: -len(str(requests[at].args[0])))
        replies: list[Any] = [None] * len(requests)
        for start in range(0, len(requests), AT_ONCE):
            places = longest_first[start : start + AT_ONCE]
            answered = getattr(self._loaded.lm, kind)([requests[at] for at in places], disable_tqdm=disable_tqdm)
            for at, reply in zip(places, answered, strict=True):
                replies[at] = reply
                if not (kind == "generate_until" and requests[at].args[1].get("do_sample")):
                    self.cache_hook.add_partial(kind, requests[at].args, reply)
        return replies

    def _key(self, subject: Subject) -> str:
        settings = self.plan.settings
        form = [self.plan.backend, self.plan.dtype, settings.max_model_len]
        return digest.of_json([self.plan.base_digest, subject.digest, *form])[:32]


class HuggingFace:
    """transformers: adapters are attached to one model as PEFT does it, and switched."""

    def __init__(self, plan: Plan) -> None:
        from lm_eval.models.huggingface import HFLM

        settings = plan.settings
        self.lm: HFLM = HFLM(
            pretrained=plan.base,
            revision=plan.revision or "main",
            dtype=plan.dtype,
            batch_size=settings.batch_size or "auto",
            max_length=settings.max_model_len or None,
            device=models.device(),
            parallelize=settings.gpus > 1,
            trust_remote_code=settings.trust_remote_code,
        )
        self.fingerprints: dict[str, tuple[float, ...]] = {}

    def choose(self, subject: Subject) -> None:
        from peft import PeftModel

        if not subject.folder:
            if self.fingerprints:
                self.lm.model.base_model.disable_adapter_layers()
            return
        if not self.fingerprints:
            self.lm._model = PeftModel.from_pretrained(self.lm.model, subject.folder, subject.name)  # noqa: SLF001
        elif subject.name not in self.fingerprints:
            self.lm.model.load_adapter(subject.folder, subject.name)
        self.lm.model.base_model.enable_adapter_layers()
        self.lm.model.set_adapter(subject.name)
        self.lm.model.eval()
        if subject.name not in self.fingerprints:
            probes = adapter.default_probes(len(self.lm.tokenizer))
            self.fingerprints[subject.name] = adapter.fingerprint(self.lm.model, probes)


class Vllm:
    """vLLM: one engine, and each request says whose adapter answers it."""

    def __init__(self, plan: Plan) -> None:
        from lm_eval.models.vllm_causallms import VLLM

        settings = plan.settings
        ranks = [subject.rank for subject in plan.subjects if subject.folder]
        lora = {"enable_lora": True, "max_lora_rank": adapter.max_lora_rank(max(ranks))} if ranks else {}
        self.lm: VLLM = VLLM(
            pretrained=plan.base,
            revision=plan.revision or None,
            dtype=plan.dtype,
            batch_size=settings.batch_size or "auto",
            max_model_len=settings.max_model_len or None,
            tensor_parallel_size=settings.gpus,
            gpu_memory_utilization=settings.gpu_memory,
            trust_remote_code=settings.trust_remote_code,
            **lora,
        )
        self._numbers = {subject.name: number for number, subject in enumerate(plan.subjects, start=1)}
        self.fingerprints: dict[str, tuple[float, ...]] = {}

    def choose(self, subject: Subject) -> None:
        from vllm.lora.request import LoRARequest

        self.lm.lora_request = None
        if subject.folder:
            request = LoRARequest(subject.name, self._numbers[subject.name], subject.folder)
            if subject.name not in self.fingerprints:
                self.fingerprints[subject.name] = self._fingerprint(request)
            self.lm.lora_request = request

    def _fingerprint(self, request: Any) -> tuple[float, ...]:
        from vllm import SamplingParams, TokensPrompt

        probes = [TokensPrompt(prompt_token_ids=list(one)) for one in adapter.default_probes(len(self.lm.tokenizer))]
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        plain, adapted = (
            [
                next(iter(found.values())).logprob
                for reply in self.lm.model.generate(probes, asked, use_tqdm=False, lora_request=lora)
                for found in reply.prompt_logprobs[1:]
            ]
            for lora in (None, request)
        )
        try:
            return adapter.changes(adapted, plain)
        except AdapterError as error:
            raise AdapterError(f"{request.lora_path}: in vLLM {error}") from None


LOADERS: dict[str, Callable[[Plan], Loaded]] = {"hf": HuggingFace, "vllm": Vllm}
