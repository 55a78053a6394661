"""Which base model is meant, where it lies, and how it is loaded.

An embedded base is named `gradeflow-base-<12 hex of its recipe's digest>` and lies in a folder of that name below
`base.folder`; a hub model is named by id and commit; a model in a folder of the user's by its files' digest.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow import digest, params
from gradeflow.adapter import EMBEDDED, BaseIdentity
from gradeflow.embedded.recipe import recipe
from gradeflow.errors import SettingsError, SetupError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def identify(settings: params.Base) -> BaseIdentity:
    """The base's identity, as adapters, runs and registered versions name it."""
    if settings.model == "embedded":
        made_from = digest.of_json(recipe(settings))
        return BaseIdentity(EMBEDDED + made_from[:12], "", made_from)
    folder = Path(settings.model)
    if folder.is_dir():
        files = [path.name for path in folder.iterdir() if path.suffix in {".json", ".safetensors", ".jinja"}]
        content = digest.of_files(folder, files)
        return BaseIdentity(folder.name, content[:12], content)
    if settings.model.startswith((".", "/", "~")):
        raise SettingsError(f"base.model: {settings.model}: no such folder")
    if not settings.revision:
        raise SettingsError(
            f"base.revision: empty; {settings.model} on the hub moves, so name the commit that is meant"
        )
    return BaseIdentity(settings.model, settings.revision, digest.of_json([settings.model, settings.revision]))


def locate(settings: params.Base, name: str = "") -> str:
    """The folder or hub id to load from: of the base that the settings mean, or of one named by an adapter."""
    named = name or identify(settings).name
    if named.startswith(EMBEDDED):
        folder = settings.folder / named
        if not (folder / "config.json").is_file():
            raise SetupError(f"{folder}: no such base model; make it with: gradeflow base")
        return str(folder)
    return settings.model


def of_adapter(settings: params.Base, name: str, revision: str) -> tuple[str, str]:
    """Where the base that an adapter names is loaded from, and at which commit.

    Raises:
        SetupError: the settings do not say where.
    """
    if name.startswith(EMBEDDED):
        return locate(settings, name), ""
    ours = identify(settings)
    if (ours.name, ours.revision) == (name, revision):
        return locate(settings), settings.revision
    if "/" not in name or not revision:
        raise SetupError(f"base {name}: neither base.model nor a hub model at a commit. Set base.model to its folder")
    return name, revision


def base_folder(settings: params.Base) -> Path:
    """The folder with the base's files; a hub model is taken from the hub's cache, or fetched into it."""
    where = locate(settings)
    if Path(where).is_dir():
        return Path(where)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(where, revision=settings.revision))


def leave_room() -> int:
    """Keep torch from taking the cores that sandboxes and servers beside it need; returns the threads it had.

    On a machine with a GPU, where torch computes elsewhere, nothing changes.
    """
    import torch

    before = torch.get_num_threads()
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    return before


@contextmanager
def leaving_room() -> Iterator[None]:
    """`leave_room` for a while: when nothing else runs, torch has all cores again."""
    import torch

    before = leave_room()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device() -> str:
    """Where a model computes: the GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def settle_threads() -> None:
    """Have MKL split its sums from the first one on as it does once `leave_room` has been: to the last bit."""
    import torch

    torch.set_num_threads(torch.get_num_threads())  # which also switches off MKL's own choice


def load(settings: params.Base, dtype: str = "float32") -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = locate(settings)
    source: dict[str, Any] = {"revision": settings.revision} if settings.revision else {}
    model = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype), **source)
    return model, AutoTokenizer.from_pretrained(where, padding_side="left", **source)
