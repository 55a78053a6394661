"""Adapter files: what they are called, whether they are whole, and whether they do anything.

An adapter is a folder as PEFT saves it: adapter_model.safetensors (or, where asked for, .bin) and adapter_config.json.
It names its base by hub id and revision, or by the recipe of an embedded base (`gradeflow-base-<12 hex>`), never by a
path: another machine finds that base below its own `base.folder`, or makes it with `gradeflow base`.
"""

from gradeflow.adapter.alive import alike, changes, default_probes, fingerprint, log_probabilities, tolerance
from gradeflow.adapter.checks import AdapterFacts, Backend, validate
from gradeflow.adapter.files import (
    CONFIG,
    EMBEDDED,
    WEIGHTS,
    BaseIdentity,
    base_shapes,
    digest,
    find_weights,
    read_config,
    stamp,
)
from gradeflow.adapter.vllm import max_lora_rank

__all__ = [
    "CONFIG",
    "EMBEDDED",
    "WEIGHTS",
    "AdapterFacts",
    "Backend",
    "BaseIdentity",
    "alike",
    "base_shapes",
    "changes",
    "default_probes",
    "digest",
    "find_weights",
    "fingerprint",
    "log_probabilities",
    "max_lora_rank",
    "read_config",
    "stamp",
    "tolerance",
    "validate",
]
