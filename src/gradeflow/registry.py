"""MLflow's registries: adapters as versions of a model, aliases that point to them, their files; and the prompts.

A version of a model holds adapter files only, never the base. It is known by the adapter's digest, as that of a
prompt is by the digest of its text: the same one is registered once.
"""

import json
import shutil
import string
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow import digest as digests
from gradeflow import prompt, tracking
from gradeflow.errors import TrackingError

if TYPE_CHECKING:
    import mlflow

ADAPTER_DIGEST = "gradeflow.adapter.digest"
FILES = "gradeflow.files"
PROMPTS = "gradeflow.prompts"
PROMPT_VERSION = "gradeflow.prompt.version"
PROMPT_PREFIX = "gradeflow."
ABOUT = """LoRA adapters, a version each, known by the digest of their files. Tags name what a version rests on.

- `champion`: what is served
- `previous`: the champion before
- `candidate`: registered last
- `challenger`: refused last
"""


@dataclass(frozen=True, slots=True)
class Version:
    name: str
    version: int
    model_id: str
    digest: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} version {self.version} ({self.digest[:12]})"


def register(folder: Path, name: str, *, digest: str, run_id: str, step: int, tags: Mapping[str, str]) -> Version:
    """Make the adapter in `folder` a version, unless one with its digest is there already.

    `run_id` is the training run that made it, at optimizer step `step`; `tags` go with the version.
    """
    if known := find(name, digest):
        set_tags(known, tags)
        return _version(_client().get_model_version(name, str(known.version)))
    import mlflow

    model_id = logged_model(folder, digest=digest, run_id=run_id, step=step)
    files = {file.name: digests.of_file(file) for file in sorted(folder.iterdir()) if file.is_file()}
    tags = {**tags, ADAPTER_DIGEST: digest, FILES: json.dumps(files, sort_keys=True)}
    client = _client()
    client.set_logged_model_tags(model_id, tags)
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name, description=ABOUT)
    return _version(mlflow.register_model(f"models:/{model_id}", name, tags=tags))


def logged_model(folder: Path, *, digest: str, run_id: str, step: int = 0) -> str:
    """The id of the run's LoggedModel with these adapter files, made where there is none.

    Its metrics are what MLflow's Models view compares.
    """
    import mlflow
    from mlflow.entities import LoggedModelOutput

    client = _client()
    experiment = client.get_run(run_id).info.experiment_id
    same = f"source_run_id = '{run_id}' AND tags.`{ADAPTER_DIGEST}` = '{digest}'"
    known = client.search_logged_models([experiment], same, max_results=1)
    if known:
        return str(known[0].model_id)
    model = mlflow.initialize_logged_model(
        name=f"adapter-{digest[:12]}",
        source_run_id=run_id,
        model_type="lora-adapter",
        tags={ADAPTER_DIGEST: digest},
        experiment_id=experiment,
    )
    client.log_model_artifacts(model.model_id, str(folder))
    mlflow.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, models=[LoggedModelOutput(model.model_id, step=step)])
    return str(model.model_id)


def log_metrics(model_id: str, values: Mapping[str, float], run_id: str) -> None:
    """Give a LoggedModel metrics that a run has measured."""
    import mlflow
    from mlflow.entities import LoggedModelInput

    _client().log_inputs(run_id, models=[LoggedModelInput(model_id)])
    mlflow.log_metrics(
        {tracking.metric_name(name): value for name, value in values.items()}, run_id=run_id, model_id=model_id
    )


def find(name: str, digest: str) -> Version | None:
    """The version of a model that holds the adapter with this digest."""
    found = _client().search_model_versions(f"name = '{name}' and tag.`{ADAPTER_DIGEST}` = '{digest}'")
    return min((_version(one) for one in found), key=lambda version: version.version, default=None)


def resolve(reference: str) -> Version | None:
    """The version behind `name@alias`, `name/3`, or either after `models:/`; None where there is none.

    Raises:
        TrackingError: the reference is none of these.
    """
    plain = reference.removeprefix("models:/")
    if "@" in plain:
        name, _, alias = plain.partition("@")
        return get_alias(name, alias)
    name, _, number = plain.rpartition("/")
    if not name or not number.isdecimal():
        raise TrackingError(f"{reference!r} names no registered adapter; expected name@alias or name/3")
    return _get(lambda client: client.get_model_version(name, number))


def get_alias(name: str, alias: str) -> Version | None:
    return _get(lambda client: client.get_model_version_by_alias(name, alias))


def set_alias(version: Version, alias: str) -> None:
    _client().set_registered_model_alias(version.name, alias, str(version.version))


def delete_alias(name: str, alias: str) -> None:
    _client().delete_registered_model_alias(name, alias)


def set_tags(version: Version, tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        if version.tags.get(key) != value:
            _client().set_model_version_tag(version.name, str(version.version), key, value)


def describe(version: Version, line: str) -> None:
    """Add a line to the version's description, unless it has it."""
    client = _client()
    before = client.get_model_version(version.name, str(version.version)).description or ""
    if line in before:
        return
    text = f"{before}\n\n{line}" if before else line
    client.update_model_version(version.name, str(version.version), text)


def fetch(version: Version, cache: Path) -> Path:
    """The adapter's files in a folder below `cache`, named by its digest; every byte is checked each time.

    Raises:
        TrackingError: the store's files are not those that were registered.
    """
    folder = cache / version.digest[:16]
    if not _problems(version, folder):
        return folder
    import mlflow.artifacts

    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".fetch-", dir=cache))
    try:
        with tracking.told():
            mlflow.artifacts.download_artifacts(f"models:/{version.model_id}", dst_path=str(fresh))
        if problems := _problems(version, fresh):
            raise TrackingError(f"{version}: the store's files are not those registered: {', '.join(problems)}")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.replace(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def record_prompts(run: tracking.Run, prompts: Sequence[prompt.Prompt]) -> None:
    """Say on the run which prompts it uses, and link it to their versions in the registry, new ones where needed.

    A registry that does not take them costs a warning and the link, and not the run: the run's own tag has the
    digests of the texts, which come with the code.
    """
    from mlflow.tracing.constant import TraceTagKey

    run.set_tags({PROMPTS: json.dumps({one.name: one.version for one in prompts})})
    try:
        with tracking.told():
            found = _prompt_versions(prompts, run)
            linked = [{"name": _registered_as(one), "version": version} for one, version in found]
            run.set_tags({TraceTagKey.LINKED_PROMPTS: json.dumps(linked)})
    except TrackingError as error:
        warnings.warn(f"the prompts are not in the registry: {error}", stacklevel=2)


def _prompt_versions(prompts: Iterable[prompt.Prompt], run: tracking.Run) -> Iterator[tuple[prompt.Prompt, str]]:
    """Each prompt with the number of the version that has its text."""
    client = _client()
    ours = f"name LIKE '{PROMPT_PREFIX}%' AND tags.`mlflow.prompt.is_prompt` = 'true'"
    found = client.search_model_versions(ours, max_results=1000)
    known = {(one.name, one.tags.get(PROMPT_VERSION)): str(one.version) for one in found}
    for one in prompts:
        yield one, known.get((_registered_as(one), one.version)) or _register(client, one, run)


def _register(client: "mlflow.MlflowClient", one: prompt.Prompt, run: tracking.Run) -> str:
    in_experiment = {"MLFLOW_EXPERIMENT_ID": run.experiment}  # in whose list of prompts it will be
    with tracking.environment(in_experiment):
        made = client.register_prompt(
            _registered_as(one),
            _in_mlflows_form(one.text),
            commit_message=f"text {one.version}",
            tags={PROMPT_VERSION: one.version},
        )
    return str(made.version)


def _registered_as(one: prompt.Prompt) -> str:
    return PROMPT_PREFIX + one.name


def _in_mlflows_form(text: str) -> str:
    """The text with `{{name}}` where ours has `{name}`, so that MLflow knows its variables."""
    parts = string.Formatter().parse(text)
    return "".join(literal + (f"{{{{{name}}}}}" if name else "") for literal, name, _, _ in parts)


def _problems(version: Version, folder: Path) -> list[str]:
    """The registered files that `folder` lacks or holds with other bytes."""
    files: Mapping[str, str] = json.loads(version.tags.get(FILES, "{}"))
    if not files:
        return [f"no tag {FILES}"]
    return [
        name
        for name, known in files.items()
        if not (folder / name).is_file() or digests.of_file(folder / name) != known
    ]


def _client() -> "mlflow.MlflowClient":
    import mlflow

    return mlflow.MlflowClient()


def _get(ask: Any) -> Version | None:
    from mlflow.exceptions import MlflowException

    with tracking.told():
        try:
            return _version(ask(_client()))
        except MlflowException as error:
            if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
                return None
            raise


def _version(found: Any) -> Version:
    tags = dict(found.tags)
    model_id = str(found.source).removeprefix("models:/")
    return Version(
        found.name,
        int(found.version),
        model_id,
        tags.get(ADAPTER_DIGEST, ""),
        tags,
        tuple(found.aliases or ()),
    )
