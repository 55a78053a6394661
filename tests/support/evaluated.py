"""Training and evaluation runs as their stages leave them, for promotion to decide on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gradeflow import adapter, registry, tracking
from gradeflow.adapter import BaseIdentity
from gradeflow.params import Params
from gradeflow.types import Sample

SHIPPED = Path(__file__).parents[2] / "params.yaml"
BASE = BaseIdentity("gradeflow-base-0123456789ab", "", "0123456789ab" + "0" * 52)
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
SCORER = "gradeflow-scorer/1+test"


def make_adapter(folder: Path, seed: int, scale: float = 1.0) -> str:
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors = {
        f"{LAYER}.lora_{half}.weight": (random.normal(size=shape) * scale).astype(np.float32)
        for half, shape in (("A", (4, 8)), ("B", (8, 4)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / adapter.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": BASE.name}))
    return adapter.digest(folder)


def samples(right: int, n: int = 100) -> list[Sample]:
    kinds: list[Any] = ["math", "text", "choice", "code"]
    return [
        Sample(f"e{i}", f"d{i}", "s", kinds[i % 4], "code", "1", float(i < right), "number", True) for i in range(n)
    ]


class World:
    """`digests` are those of an evaluation's adapters, by its run."""

    def __init__(self, settings: Params, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.digests: dict[str, list[str]] = {}
        tracking.connect(settings.tracking, Path())

    def evaluation(
        self,
        base: int,
        *adapters: tuple[int, int],
        scorer: str = SCORER,
        clean: bool | None = True,
        asked: dict[str, Any] | None = None,
        trained_here: bool = True,
        **changes: Any,
    ) -> str:
        """An evaluation run; each adapter is (seed, right answers)."""
        trained = [self._trained(seed, clean, **changes) for seed, _ in adapters]
        with tracking.start_run("evaluate", {}) as run:
            entries = {}
            self._log_samples(run, "base", samples(base))
            for (training, folder), (_, right) in zip(trained, adapters, strict=True):
                digest = adapter.digest(folder)
                short = digest[:12]
                run.log_artifacts(folder, f"adapters/{short}")
                self._log_samples(run, short, samples(right))
                entries[short] = {
                    "digest": digest,
                    "path": f"adapters/{short}",
                    "training_run": training if trained_here else "",
                }
            identity = {"name": BASE.name, "revision": "", "digest": BASE.digest}
            results = {"base": identity, "adapters": entries, "asked": asked or {}}
            results |= {"scorer": scorer} if scorer else {}
            run.log_text(json.dumps(results), "results.json")
        self.digests[run.id] = [entry["digest"] for entry in entries.values()]
        return run.id

    def _trained(self, seed: int, clean: bool | None, **changes: Any) -> tuple[str, Path]:
        with tracking.start_run("train_grpo", {}) as run:
            folder = self.folder / f"{run.id}-{seed}"
            digest = make_adapter(folder, seed, **changes)
            run.log_dataset("train_mixed", Path("data/mixed/train_mixed.jsonl"), "a" * 32, "training", 1)
            run.log_artifacts(folder, "adapter")
            run.set_tags({registry.ADAPTER_DIGEST: digest})
            if clean is not None:
                run.log_text(json.dumps({"config": {"decontaminate": clean}}), "dataset/dataset_stats.json")
        return run.id, folder

    def _log_samples(self, run: tracking.Run, name: str, found: list[Sample]) -> None:
        run.log_text("".join(json.dumps(one.to_row()) + "\n" for one in found), f"samples/{name}.jsonl")

    def alias(self, alias: str) -> int | None:
        version = registry.get_alias(self.settings.promote.model, alias)
        return version.version if version else None

    def aliases(self) -> dict[str, int | None]:
        return {name: self.alias(name) for name in ("candidate", "challenger", "champion", "previous")}
