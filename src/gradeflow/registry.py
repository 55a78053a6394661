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
RANK = "gradeflow.adapter.rank"
FINGERPRINT = "gradeflow.adapter.fingerprint"
"""What the adapter does to log-probabilities, as the evaluation saw it, as JSON: `dtype` and `changes`."""
FILES = "gradeflow.files"
PROMPTS = "gradeflow.prompts"
PROMPT_VERSION = "gradeflow.prompt.version"
PROMPT_PREFIX = "gradeflow."
LONGEST = 5000
"""Characters of a version's description that stores take."""
LOADER = "gradeflow.server.pyfunc"
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
    made_ms: int = 0
    """When, in milliseconds since the epoch."""

    def __str__(self) -> str:
        return f"{self.name} version {self.version} ({self.digest[:12]})"


def register(folder: Path, name: str, *, digest: str, run_id: str, step: int, tags: Mapping[str, str]) -> Version:
    """Make the adapter in `folder` a version, unless one with its digest is there already.

    `run_id` is the training run that made it, at optimizer step `step`; `tags` go with the version. One that is there
    already keeps the tags that it has: what it rests on is what it was registered with.
    """
    if known := find(name, digest):
        set_tags(known, {key: value for key, value in tags.items() if key not in known.tags})
        return _version(_client().get_model_version(name, str(known.version)))
    import mlflow

    model_id = logged_model(folder, digest=digest, run_id=run_id, step=step)
    with tempfile.TemporaryDirectory() as place:
        stored = Path(_download(model_id, Path(place)))
        files = {file.name: digests.of_file(file) for file in sorted(stored.iterdir()) if file.is_file()}
    for file in folder.iterdir():
        if file.is_file() and files.get(file.name) != digests.of_file(file):
            raise TrackingError(f"{file}: the store has another file of that name, or none, in model {model_id}")
    tags = {**tags, ADAPTER_DIGEST: digest, FILES: json.dumps(files, sort_keys=True)}
    client = _client()
    client.set_logged_model_tags(model_id, tags)
    _create(name, ABOUT)
    return _version(mlflow.register_model(f"models:/{model_id}", name, tags=tags))


def logged_model(folder: Path, *, digest: str, run_id: str, step: int = 0) -> str:
    """The id of the run's LoggedModel with these adapter files, made where there is none.

    Its metrics are what MLflow's Models view compares.
    """
    import mlflow
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    client = _client()
    experiment = client.get_run(run_id).info.experiment_id
    same = f"source_run_id = '{run_id}' AND tags.`{ADAPTER_DIGEST}` = '{digest}'"
    known = client.search_logged_models([experiment], same, max_results=1)
    if known and known[0].status == LoggedModelStatus.READY:
        return str(known[0].model_id)
    model = (
        known[0]
        if known
        else mlflow.initialize_logged_model(  # what is there may have been cut off
            name=f"adapter-{digest[:12]}",
            source_run_id=run_id,
            model_type="lora-adapter",
            tags={ADAPTER_DIGEST: digest},
            experiment_id=experiment,
        )
    )
    with tempfile.TemporaryDirectory() as place:
        client.log_model_artifacts(model.model_id, str(_as_model(folder, Path(place) / "model", model.model_id)))
    mlflow.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, models=[LoggedModelOutput(model.model_id, step=step)])
    return str(model.model_id)


def _as_model(folder: Path, into: Path, model_id: str) -> Path:
    """A copy of the adapter with what tells MLflow how to load it."""
    import mlflow.pyfunc
    from mlflow.models import Model

    shutil.copytree(folder, into)
    described = Model(model_id=model_id)
    mlflow.pyfunc.add_to_model(described, loader_module=LOADER)
    described.save(into / "MLmodel")
    (into / "requirements.txt").write_text("gradeflow[train]\n", encoding="utf-8")
    return into


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
    return get_version(name, int(number))


def get_version(name: str, number: int) -> Version | None:
    return _get(lambda client: client.get_model_version(name, str(number)))


def versions(name: str) -> list[Version]:
    """All of a model, the oldest first; none where there is no such model."""
    from mlflow.store.entities.paged_list import PagedList

    found: list[Version] = []
    page: PagedList[Any] | None = None
    with tracking.told():
        while page is None or page.token:
            token = page.token if page else None
            page = _client().search_model_versions(f"name = '{name}'", max_results=1000, page_token=token)
            found += map(_version, page)
    return sorted(found, key=lambda version: version.version)


def append(name: str, of: Version, tags: Mapping[str, str], *, line: str, run_id: str | None, about: str) -> Version:
    """A new version of `name` with the files of another model's version. The store gives each number once.

    `about` describes the model where it is made by this.
    """
    with tracking.told():
        _create(name, about)
        made = _client().create_model_version(
            name, f"models:/{of.model_id}", run_id=run_id, tags=dict(tags), description=line, model_id=of.model_id
        )
    return _version(made)


def _create(name: str, about: str) -> None:
    """Make a registered model, unless it is there, or just comes to be."""
    from mlflow.exceptions import MlflowException

    client = _client()
    if client.search_registered_models(f"name = '{name}'"):
        return
    try:
        client.create_registered_model(name, description=about)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def get_alias(name: str, alias: str) -> Version | None:
    return _get(lambda client: client.get_model_version_by_alias(name, alias))


def aliases(name: str) -> dict[str, int]:
    """The version that each alias of a model leads to; none where there is no such model."""
    from mlflow.exceptions import MlflowException

    with tracking.told():
        try:
            found = _client().get_registered_model(name).aliases
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return {}
            raise
    return {alias: int(number) for alias, number in dict(found).items()}


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
    while len(text) > LONGEST and "\n\n" in text:
        text = text.partition("\n\n")[2]  # the oldest goes
    text = text[:LONGEST]
    client.update_model_version(version.name, str(version.version), text)


def fetch(version: Version, cache: Path) -> Path:
    """The adapter's files in a folder below `cache`, named by its digest; every byte is checked each time.

    Raises:
        TrackingError: the store's files are not those that were registered.
    """
    folder = cache / version.digest[:16]
    if not changed_files(version, folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".fetch-", dir=cache))
    try:
        download(version, fresh)
        if wrong := changed_files(version, fresh):
            raise TrackingError(f"{version}: the store's files are not those registered: {', '.join(wrong)}")
        if not changed_files(version, folder):  # another process was faster
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        fresh.replace(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def download(version: Version, into: Path) -> Path:
    """Copy the store's files of a version, whatever they are by now, into a folder."""
    return _download(version.model_id, into)


def _download(model_id: str, into: Path) -> Path:
    import mlflow.artifacts

    into.mkdir(parents=True, exist_ok=True)
    with tracking.told():
        mlflow.artifacts.download_artifacts(f"models:/{model_id}", dst_path=str(into))
    (into / "registered_model_meta").unlink(missing_ok=True)  # MLflow's own note on the copy
    return into


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


def changed_files(version: Version, folder: Path) -> list[str]:
    """The registered files that `folder` lacks or holds with other bytes."""
    files: Mapping[str, str] = json.loads(version.tags.get(FILES, "{}"))
    if not files:
        return [f"no tag {FILES}"]
    return [
        name
        for name, known in files.items()
        if not (folder / name).is_file() or digests.of_file(folder / name) != known
    ]


def measured(version: Version) -> dict[str, float]:
    """The newest value of each metric of a version's LoggedModel."""
    with tracking.told():
        found = _client().get_logged_model(version.model_id).metrics or []
    return {one.key: one.value for one in sorted(found, key=lambda one: one.timestamp)}


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
        int(found.creation_timestamp or 0),
    )
