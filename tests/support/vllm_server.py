"""A stand-in for vLLM: its protocol over a small model of this process, which breaks as it is told to."""

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch

from support.local_server import Listening, LocalServer


class VllmServer(LocalServer):
    """Serves a base, as `base`, and the adapters that it is told to load.

    `busy` is how many questions are answered 503 first. `binds` says whether an adapter changes anything, `processed`
    whether log-probabilities are those at the temperature, `updates` whether adapters can be loaded, `sees` whether
    their folder is found, `forgets` how often a completion finds that the server was started again, `room` how many
    tokens the model can have. Log-probabilities are told `skew` lower than they are. `most` is how many
    adapters there were at once.
    """

    def __init__(
        self,
        base: Path,
        *,
        busy: int = 0,
        binds: bool = True,
        processed: bool = True,
        updates: bool = True,
        sees: bool = True,
        forgets: int = 0,
        room: int = 608,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.busy, self.binds, self.processed, self.updates = busy, binds, processed, updates
        self.sees, self.forgets, self.room = sees, forgets, room
        self.model: Any = AutoModelForCausalLM.from_pretrained(base)
        self.adapters: dict[str, str] = {}
        self.loads: list[str] = []
        self.skew = 0.0
        self.most = 0
        self.asked: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        super().__init__(_Handler)

    def load(self, name: str, folder: str) -> tuple[int, str]:
        if not name:
            return 400, "Both 'lora_name' and 'lora_path' must be provided."
        if name in self.adapters:
            return 400, f"The lora adapter '{name}' has already been loaded."
        if not self.sees or not Path(folder, "adapter_config.json").is_file():
            return 404, f"No adapter found for {folder}"
        if name not in self.loads:
            self._attach(name, folder)
        self.adapters[name] = folder
        self.loads.append(name)
        self.most = max(self.most, len(self.adapters))
        return 200, "Success"

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] != "base" and self.forgets:
            self.forgets -= 1
            self.adapters.clear()
        if body["model"] not in {"base", *self.adapters}:
            return 404, f"The model `{body['model']}` does not exist."
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        return 200, [self._choice(index, prompt, body) for index, prompt in enumerate(prompts)]

    def _attach(self, name: str, folder: str) -> None:
        from peft import PeftModel

        if isinstance(self.model, PeftModel):
            self.model.load_adapter(folder, name)
        else:
            self.model = PeftModel.from_pretrained(self.model, folder, name)

    def _logits(self, name: str, ids: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor([list(ids)])
        with torch.no_grad():
            if not hasattr(self.model, "disable_adapter"):
                return self.model(tokens).logits[0]  # type: ignore[no-any-return]
            if name == "base" or not self.binds:
                with self.model.disable_adapter():
                    return self.model(tokens).logits[0]  # type: ignore[no-any-return]
            self.model.set_adapter(name)
            return self.model(tokens).logits[0]  # type: ignore[no-any-return]

    def _choice(self, index: int, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if "prompt_logprobs" in body:
            shares = self._logits(body["model"], prompt).log_softmax(-1)
            told = [
                {str(token): {"logprob": float(row[token])}} for token, row in zip(prompt[1:], shares, strict=False)
            ]
            return choice | {"prompt_logprobs": [None, *told]}
        chance, ids, log_probs, best = torch.Generator().manual_seed(body.get("seed") or 0), list(prompt), [], []
        while len(ids) < len(prompt) + body["max_tokens"] and (ids == prompt or ids[-1] not in body["stop_token_ids"]):
            logits = self._logits(body["model"], ids)[-1]
            warm = (logits / body["temperature"]).log_softmax(-1)
            told_from = warm if self.processed else logits.log_softmax(-1)
            ids.append(int(torch.multinomial(warm.exp(), 1, generator=chance)))
            log_probs.append(float(told_from[ids[-1]]) - self.skew)
            best.append({"best": float(told_from.max())})
        return choice | {
            "token_ids": ids[len(prompt) :],
            "logprobs": {"token_logprobs": log_probs, "top_logprobs": best},
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listening

    def do_GET(self) -> None:
        owner = self.server.owner
        cards = [{"id": "base", "root": "/base", "parent": None, "max_model_len": owner.room}]
        cards += [{"id": name, "root": root, "parent": "base"} for name, root in owner.adapters.items()]
        self._send(200, {"data": cards})

    def do_POST(self) -> None:
        owner = self.server.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with owner.lock:
            if self.path == "/v1/completions":
                if owner.busy:
                    owner.busy -= 1
                    return self._send(503, {"error": {"message": "busy"}})
                owner.asked.append(body)
                status, found = owner.complete({"stop_token_ids": [], **body})
                return self._send(status, {"choices": found} if status == 200 else {"error": {"message": found}})
            if not owner.updates:
                return self._send(404, {"detail": "Not Found"})
            if self.path == "/v1/load_lora_adapter":
                status, said = owner.load(body["lora_name"], body["lora_path"])
            else:
                known = owner.adapters.pop(body["lora_name"], None)
                status, said = (404, "cannot be found") if known is None else (200, "Success")
        return self._send(status, {"error": {"message": said}})

    def _send(self, status: int, content: Any) -> None:
        sent = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None: ...
