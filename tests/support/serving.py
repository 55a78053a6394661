"""A base of random weights that reads and writes bytes, its adapters in a real registry, and their server."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from gradeflow import adapter, params, registry, serve, tracking
from gradeflow.params import Params
from gradeflow.registry import Version
from gradeflow.serve import Found, Server
from gradeflow.server import running

ROOT = Path(__file__).parents[2]
EXPERIMENT = "gradeflow-tests"
BASE = "gradeflow-base-0123456789ab"
REQUESTS = int(os.environ.get("GRADEFLOW_FUZZ", "300"))
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]


def make_base(folder: Path) -> None:
    """A random Qwen2 of two layers that reads and writes bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|end|>", "<|pad|>", *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=0,
        pad_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_adapter(base: Path, folder: Path, *, zero: bool = False, seed: int = 1) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=zero, task_type="CAUSAL_LM"
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(folder)
    adapter.stamp(folder, adapter.BaseIdentity(BASE, "", "d"))


def make(folder: Path) -> Path:
    """models/BASE, and the adapters `adapter`, `other`, and `zero`, which does nothing."""
    make_base(folder / "models" / BASE)
    make_adapter(folder / "models" / BASE, folder / "adapter")
    make_adapter(folder / "models" / BASE, folder / "other", seed=2)
    make_adapter(folder / "models" / BASE, folder / "zero", zero=True)
    return folder


def register(folder: Path, name: str = "policy", alias: str = "", **tags: str) -> Version:
    with tracking.start_run("train_grpo", {}) as run:
        digest = adapter.digest(folder)
        version = registry.register(folder, name, digest=digest, run_id=run.id, step=1, tags=tags)
    if alias:
        registry.set_alias(version, alias)
    return version


def connect(folder: Path) -> None:
    """The store in a folder, whatever the environment says."""
    tracking.connect(params.Tracking(uri=f"sqlite:///{folder / 'mlflow.db'}", experiment=EXPERIMENT), folder)


def settings(made: Path, **changed: Any) -> Params:
    loaded = params.load(ROOT / "params.yaml")
    told = {"models": ["policy@champion"], "port": 0, "backend": "transformers", "max_tokens": 64, "poll_s": 0.05}
    section = loaded.serve.model_copy(update=told | changed)
    base = loaded.base.model_copy(update={"folder": made / "models"})
    return loaded.model_copy(update={"serve": section, "base": base})


def find(made: Path, cache: Path = running.CACHE, **changed: Any) -> Found:
    return serve.find(settings(made, **changed), cache=cache)


def start(made: Path, root: Path = Path(), **changed: Any) -> None:
    """Start a server and stop it at once."""
    with serve.serving(find(made), settings(made, **changed), root):
        pass


def ask(client: openai.OpenAI, content: str = "What is 3 + 4?", **more: Any) -> Any:
    asked: dict[str, Any] = {"model": "policy@champion", "temperature": 0, "max_tokens": 16, **more}
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **asked)


def directly(made: Path, content: str, count: int, *, adapted: bool) -> str:
    """The greedy answer without a server."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = made / "models" / BASE
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(model, str(made / "adapter")) if adapted else model
    prompt = torch.tensor([tokenizer(f"<user>{content}\n<assistant>")["input_ids"]])
    made_ids = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count
    )
    return str(tokenizer.decode(made_ids[0, prompt.shape[1] :], skip_special_tokens=True))


def await_version(client: openai.OpenAI, version: Version, name: str) -> None:
    """Until a name leads to it."""
    deadline = time.monotonic() + 10
    while ask(client, model=name, max_tokens=1).system_fingerprint != version.digest[:12]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fuzz(server: Server, folder: Path, model: str) -> int:
    """Send so many requests; returns how many there were.

    Half of those that are made keep to the schema. All of these name the model, as others go no further than its name.
    """
    root = server.url.removesuffix("/v1")
    schema: dict[str, Any] = httpx.get(f"{root}/openapi.json").json()
    asking = {path: schema["paths"][path] for path in schema["paths"] if path.endswith("completions")}
    for name, one in schema["components"]["schemas"].items():
        if "model" in one.get("properties", {}):
            schema["components"]["schemas"][name]["properties"]["model"] = {"type": "string", "enum": [model]}
    file = folder / "openapi.json"
    file.write_text(json.dumps(schema | {"paths": asking}))
    program = Path(sys.executable).with_name("schemathesis")
    done = subprocess.run(
        [
            *(program, "run", str(file), "--url", root, "--phases", "fuzzing", "--checks", "not_a_server_error"),
            *("--max-examples", str(REQUESTS), "--mode", "all", "--seed", "0", "--no-color", "--continue-on-failure"),
            *("--suppress-health-check", "all", "--request-timeout", "60"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (count,) = re.findall(r"([0-9]+) generated", done.stdout)
    return int(count)
