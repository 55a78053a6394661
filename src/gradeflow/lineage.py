"""What a registered adapter rests on, as tags of its version: base, data, code, runs, scorer and judge."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow.adapter import BaseIdentity
from gradeflow.errors import PromotionError

BASE = "gradeflow.base"
TRAINING_RUN = "gradeflow.run.training"
EVALUATION_RUN = "gradeflow.run.evaluation"
DATA = "gradeflow.data."
DVC = "gradeflow.dvc."
SCORER = "gradeflow.scorer.version"
JUDGE_MODEL = "gradeflow.judge.model"
JUDGE_PROMPT = "gradeflow.judge.prompt"


@dataclass(frozen=True, slots=True)
class Sources:
    """Where an adapter comes from.

    `git` are the training run's tags of commit and dirtiness; `data` is what its runs read, name ->
    MD5, and `dvc` what dvc.lock says of the mixed files, path -> MD5.
    """

    base: BaseIdentity
    training_run: str
    evaluation_run: str
    git: Mapping[str, str]
    data: Mapping[str, str]
    dvc: Mapping[str, str]
    scorer: str
    judge_model: str
    judge_prompt: str


def collect(sources: Sources) -> dict[str, str]:
    """The tags of a version; what is not known has no tag."""
    tags = {
        f"{BASE}.name": sources.base.name,
        f"{BASE}.revision": sources.base.revision,
        f"{BASE}.digest": sources.base.digest,
        TRAINING_RUN: sources.training_run,
        EVALUATION_RUN: sources.evaluation_run,
        **sources.git,
        SCORER: sources.scorer,
        JUDGE_MODEL: sources.judge_model,
        JUDGE_PROMPT: sources.judge_prompt,
        **{DATA + name: md5 for name, md5 in sources.data.items()},
        **{DVC + path: md5 for path, md5 in sources.dvc.items()},
    }
    return {name: value for name, value in tags.items() if value}


def base_identity(tags: Mapping[str, str]) -> BaseIdentity:
    """The base that a version's tags name."""
    return BaseIdentity(*(tags.get(f"{BASE}.{part}", "") for part in ("name", "revision", "digest")))


def dvc_lock_digests(root: Path) -> dict[str, str]:
    """MD5 of every output in dvc.lock by path; nothing where the file is missing.

    Raises:
        PromotionError: the file is there and cannot be read.
    """
    import ruamel.yaml
    from ruamel.yaml.error import YAMLError

    file = root / "dvc.lock"
    if not file.exists():
        return {}
    try:
        lock: Any = ruamel.yaml.YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8"))
        outputs = [output for stage in lock["stages"].values() for output in stage.get("outs", [])]
        return {str(output["path"]): str(output["md5"]) for output in outputs}
    except (YAMLError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PromotionError(f"{file}: not a dvc.lock: {' '.join(str(error).split())}. Run `dvc repro`") from None
