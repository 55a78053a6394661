"""lm-eval's tasks by name: which there are, what they need, and their definitions over data of one's own.

The names are those of lm-eval's own index of tasks, groups and tags. It is made anew here from the few lines of each
YAML that name it, since lm-eval takes ten seconds for reading all of the 14,000 files.
"""

import difflib
import fnmatch
import functools
import glob
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gradeflow import digest, params
from gradeflow.errors import DataError, SettingsError, SetupError
from gradeflow.evaluation import preflight, unit_tests
from gradeflow.evaluation.original import offline
from gradeflow.evaluation.plan import WORKFLOW

ALIASES = {"math": "hendrycks_math"}
"""What is documented as `math` is no task of lm-eval. minerva_math asks the same questions and also reads a boxed
answer, but needs antlr4 4.11, which cannot be installed beside DVC's 4.9."""

SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
BUILDERS = {"json": ("jsonl", "json", "jsonl.gz", "json.gz"), "parquet": ("parquet",), "csv": ("csv", "csv.gz")}

_DATA = ("dataset_path", "dataset_name", "dataset_kwargs")
_INHERITED = (*_DATA, "unsafe_code", *SPLITS)
_NAMING = re.compile(
    rb"^[\"']?(?:task|group|tag|class|include)[\"']?[ \t]*:.*\n?(?:(?:[ \t#-].*)?\n)*(?:[ \t#-].*\Z)?", re.MULTILINE
)

Index = dict[str, Any]  # lm-eval's Entry of each name


@dataclass(frozen=True, slots=True)
class Leaf:
    """A task without parts. `path` and `name` say which dataset; tasks that are classes, or make their data, have none.

    `splits` are those that the definition names, `tested` the one that the questions come from. `sources` are the
    Python files that it takes functions from. Of one that is `grouped`, a group says where the data come from.
    """

    task: str
    path: str
    name: str
    files: tuple[str, ...]
    splits: tuple[str, ...]
    tested: str
    sources: tuple[Path, ...]
    grouped: bool
    runs_code: bool

    @property
    def by_code_eval(self) -> bool:
        """Whether one of its functions asks for that metric."""
        return self.mentions("code_eval")

    def mentions(self, text: str) -> bool:
        return any(text in file.read_text(encoding="utf-8") for file in self.sources)


def resolve(names: Sequence[str], include: Sequence[str] = ()) -> list[str]:
    """lm-eval's names, or absolute paths of YAML files, without repetition; `workflow` stays. Globs are written out.

    Raises:
        SettingsError: naming the nearest names to an unknown one, or file and line of a YAML that cannot be read.
    """
    index, found, unknown = _index(include), [], []
    for name in names:
        if Path(name).suffix in {".yaml", ".yml"}:
            _own(Path(name))
            found.append(str(Path(name).resolve()))
        elif name == WORKFLOW or name in index:
            found.append(name)
        elif name in ALIASES:
            found.append(ALIASES[name])
        elif any(mark in name for mark in "*?[") and (matching := fnmatch.filter(sorted(index), name)):
            found += matching
        else:
            near = difflib.get_close_matches(name, [*index, *ALIASES, WORKFLOW], n=4)
            unknown.append(f"{name!r}" + (f" (nearest: {', '.join(near)})" if near else ""))
    if unknown:
        raise SettingsError(f"evaluate.tasks: no such task: {', '.join(unknown)}; `lm-eval ls tasks` lists all")
    return list(dict.fromkeys(found))


def leaves(task: str, include: Sequence[str] = ()) -> list[Leaf]:
    """The tasks that a resolved name stands for, those of a group's groups too."""
    if task == WORKFLOW:
        return []
    index = _index(include)
    return [_leaf(*found) for found in _expand(_entry(task, index), index, {})]


def needs_code(task: str, include: Sequence[str] = ()) -> bool:
    """Whether it, or a part of it, runs generated code."""
    return any(leaf.runs_code for leaf in leaves(task, include))


def datasets_of(task: str, include: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Path and name of each dataset that is read, as `datasets.load_dataset` takes them; no name is empty."""
    return list(dict.fromkeys((leaf.path, leaf.name) for leaf in leaves(task, include) if leaf.path))


def contents(names: Sequence[str], settings: params.Evaluate) -> str:
    """Digest of what the names stand for: definitions (lm-eval's own by its version), functions, rows that are here."""
    definitions = {name: entry.cfg for folder in settings.include for name, entry in _of_folder(Path(folder)).items()}
    definitions |= {name: _read(Path(name)) for name in names if Path(name).suffix in {".yaml", ".yml"}}
    parts = [leaf for name in names for leaf in leaves(name, settings.include)]
    files = {file for leaf in parts for file in (*leaf.sources, *_rows(leaf, settings.data))}
    told = {name: str(definition) for name, definition in definitions.items()}
    return digest.of_json([version("lm_eval"), told, sorted(map(digest.of_file, files))])


def require_consent(names: Sequence[str], settings: params.Evaluate) -> None:
    """Look for tasks that run generated code.

    Raises:
        SettingsError: there are some, and the settings do not allow it; or one that would run it outside the sandbox.
    """
    coding = [leaf for name in names for leaf in leaves(name, settings.include) if leaf.runs_code]
    if coding and not settings.confirm_run_unsafe_code:
        raise SettingsError(
            f"evaluate.confirm_run_unsafe_code is false, and {_listed(coding)} would run code that the model has "
            "written; set it to true to allow that, in the sandbox, or leave the task out"
        )
    if outside := [leaf for leaf in coding if not leaf.by_code_eval]:
        raise SettingsError(
            f"evaluate.tasks: {_listed(outside)} would run generated code in lm-eval's own process, as its metric is "
            "not code_eval, which the sandbox stands for; leave it out"
        )


def absent(names: Sequence[str], settings: params.Evaluate, *, offline: bool = True) -> list[str]:
    """The datasets that could not be read, each with what is missing.

    Neither in evaluate.data, nor a file of one's own, nor, `offline`, in the datasets cache. What a task that is a
    class reads, or one that makes its data, is not known beforehand, unless evaluate.data names it in vain.
    """
    found: dict[tuple[str, str], str] = {}
    several = _names_by_path(names, settings)
    for leaf in (leaf for name in names for leaf in leaves(name, settings.include)):
        if not leaf.path:
            found |= {(path, leaf.task): _in_vain(path, leaf) for path in settings.data if leaf.mentions(path)}
        elif leaf.path in settings.data:
            try:
                _files(leaf, settings.data, several)
            except DataError as error:
                found[leaf.path, leaf.name] = str(error)
        elif offline and not _is_here(leaf):
            said = f"{leaf.path} ({leaf.name})" if leaf.name else leaf.path
            found[leaf.path, leaf.name] = f"{said}: not in the datasets cache, and evaluate.data names no folder for it"
    return list(found.values())


def known(settings: params.Evaluate) -> preflight.Tasks:
    """What the preflight asks of tasks."""
    without_hub = offline(os.environ) or settings.where == "docker"
    return preflight.Tasks(
        needs_code=lambda task: needs_code(task, settings.include),
        missing=lambda task: "; ".join(absent([task], settings, offline=without_hub)),
    )


def load(names: Sequence[str], settings: params.Evaluate) -> list[Any]:
    """The task and group objects of resolved names, for `simple_evaluate(tasks=...)`; `workflow` is left out.

    Where evaluate.data names a dataset, lm-eval's definition reads those files. Tasks that run code are loaded and
    evaluated within `unit_tests.in_sandbox`. Beside the objects, simple_evaluate is given a
    `TaskManager(include_defaults=False)`, else it reads all YAMLs.

    Raises:
        SettingsError: no consent for generated code.
        DataError: a dataset cannot be read, or lacks a split that the definition names.
        SetupError: a task needs a package that is not installed.
    """
    from lm_eval.api.group import Group
    from lm_eval.tasks import TaskManager

    require_consent(names, settings)
    manager = TaskManager(include_defaults=False)
    index: Index = manager.task_index
    index |= _index(settings.include)
    entries = {name: _entry(name, index) for name in names if name != WORKFLOW}
    index |= {entry.name: entry for entry in entries.values()}
    several = _names_by_path(names, settings)
    own = {leaf.task: leaf for name in names for leaf in leaves(name, settings.include) if leaf.path in settings.data}
    for task, leaf in own.items():
        if task in index:
            index[task] = _over(index[task], leaf, _files(leaf, settings.data, several))
    loaded = [item for entry in entries.values() for item in _loaded(manager, entry.name)]
    for item in loaded:
        for task in item.get_all_tasks() if isinstance(item, Group) else [item]:
            if getattr(task, "UNSAFE_CODE", False):
                unit_tests.run_together(task)
    return loaded


def _loaded(manager: Any, name: str) -> list[Any]:
    """A group, a task, or all tasks of a tag."""
    try:
        found = manager.load([name])
    except (ImportError, AssertionError) as error:
        raise SetupError(f"{name}: lm-eval cannot load it: {' '.join(str(error).split())}") from error
    except (FileNotFoundError, ConnectionError) as error:
        said = " ".join(str(error).split())
        raise DataError(
            f"{name}: its data cannot be read: {said}. Without the hub, name a folder in evaluate.data"
        ) from error
    inner = {child for children in found["group_map"].values() for child in children}
    return [item for own in (found["groups"], found["tasks"]) for key, item in own.items() if key not in inner]


def _listed(leaves: Sequence[Leaf]) -> str:
    names = list(dict.fromkeys(leaf.task for leaf in leaves))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# What there is


def _index(include: Sequence[str]) -> Index:
    """lm-eval's own tasks, and over them those of each folder."""
    index = dict(_published())
    for folder in include:
        if not Path(folder).is_dir():
            raise SettingsError(f"evaluate.include: {folder}: no such folder")
        index |= _of_folder(Path(folder))
    return index


@functools.cache
def _published() -> Index:
    import lm_eval.tasks
    import yaml
    from lm_eval.tasks._index import TaskIndex

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Takes `!function` for text."""

    Loader.add_multi_constructor("!", lambda _, __, node: node.value)
    read: dict[str, dict[str, Any]] = {}

    def naming(file: str) -> dict[str, Any]:
        if file not in read:
            own = yaml.load(b"\n".join(_NAMING.findall(Path(file).read_bytes())), Loader) or {}  # noqa: S506
            included = own.pop("include", [])
            for other in included if isinstance(included, list) else [included]:
                own = naming(os.path.normpath(Path(file).parent / other)) | own
            read[file] = own
        return read[file]

    index: Index = {}
    root = Path(lm_eval.tasks.__file__).parent
    for file in sorted(f"{at}/{name}" for at, _, names in os.walk(root) for name in names if name.endswith(".yaml")):
        if config := naming(file):
            TaskIndex.process_cfg(config, Path(file), index)
    return index


def _of_folder(folder: Path) -> Index:
    from lm_eval.tasks._index import TaskIndex

    index: Index = {}
    for file in sorted(folder.resolve().rglob("*.yaml")):
        config = _read(file)
        if config.keys() & {"task", "group", "class"}:  # others are there to be included
            TaskIndex.process_cfg(config, file, index)
    return index


def _entry(task: str, index: Index) -> Any:
    return index[task] if task in index else _own(Path(task))


def _own(file: Path) -> Any:
    from lm_eval.tasks._index import TaskIndex

    config = _read(file)
    if not isinstance(config.get("task") or config.get("group"), str):
        raise SettingsError(f"{file}: no task: expected `task: NAME` or `group: NAME`")
    return TaskIndex.entry_from_path(file)


def _read(file: Path) -> dict[str, Any]:
    import yaml
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        config: dict[str, Any] = load_yaml(file, resolve_func=False)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark else str(file)
        said = " ".join(str(getattr(error, "problem", None) or error).split())
        raise SettingsError(f"{where}: not valid YAML: {said}") from None
    except OSError as error:
        raise SettingsError(f"{error.filename}: {error.strerror}; evaluate.tasks or include names {file}") from None
    except ValueError as error:
        raise SettingsError(f"{file}: {error}") from None
    return config


def _expand(entry: Any, index: Index, given: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name and definition of each task behind an entry; what a group says of its members stands over theirs.

    The third is whether it is a group that says where the data come from.
    """
    if entry.kind.name == "TAG":
        for name in sorted(entry.tags):
            yield from _expand(index[name], index, given)
        return
    config = _read(entry.yaml_path)
    if entry.kind.name == "GROUP":
        yield from _members(config, index, given)
    else:
        yield entry.name, config | dict(given), not given.keys().isdisjoint(_DATA)


def _members(
    group: Mapping[str, Any], index: Index, given: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    given = _inherited(group) | dict(given)
    for member in group.get("task") or []:
        own: dict[str, Any] = {"task": member} if isinstance(member, str) else member
        name, changes = str(own.get("group") or own["task"]), given | _inherited(own)
        if name in index:
            yield from _expand(index[name], index, changes)
        elif "group" in own:
            yield from _members(own, index, changes)
        else:
            yield name, own | changes, True


def _inherited(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in _INHERITED if key in config}


def _leaf(task: str, config: Mapping[str, Any], grouped: bool) -> Leaf:  # noqa: FBT001
    makes_its_own = "class" in config or "custom_dataset" in config
    shots = config.get("fewshot_config")
    splits = [config.get(key) for key in SPLITS] + [shots.get("split") if isinstance(shots, dict) else None]
    files = (config.get("dataset_kwargs") or {}).get("data_files") or ()
    return Leaf(
        task,
        "" if makes_its_own else config.get("dataset_path") or "",
        str(config.get("dataset_name") or ""),
        tuple(_texts(files)),
        tuple(dict.fromkeys(split for split in splits if split)),
        config.get("test_split") or config.get("validation_split") or "",
        tuple(_sources(config)),
        grouped,
        bool(config.get("unsafe_code")),
    )


def _texts(value: Any) -> Iterator[str]:
    """All strings in a tree of dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _sources(config: Mapping[str, Any]) -> list[Path]:
    """The Python files that a definition takes functions from."""
    named = {text.rpartition(".")[0] + ".py" for text in _texts(config) if text.startswith("/") and " " not in text}
    return [file for file in map(Path, sorted(named)) if file.is_file()]


# Where its data comes from


def _names_by_path(names: Sequence[str], settings: params.Evaluate) -> Mapping[str, set[str]]:
    found = defaultdict(set)
    for name in names:
        for path, part in datasets_of(name, settings.include):
            found[path].add(part)
    return found


def _rows(leaf: Leaf, data: Mapping[str, str]) -> Iterator[Path]:
    """The files on this machine that its questions may come from."""
    place = data.get(leaf.path, leaf.path)
    for found in map(Path, _matching(leaf.files) if leaf.files else [place] if place else []):
        yield from (file for file in (found, *found.rglob("*")) if file.is_file())


def _matching(files: Sequence[str]) -> list[str]:
    return [found for file in files for found in glob.glob(file)]  # noqa: PTH207 - it may be absolute


def _files(leaf: Leaf, data: Mapping[str, str], several: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The files of each split that a definition names, in the place that evaluate.data gives for its dataset.

    A folder has a file SPLIT.EXTENSION for each, or numbered ones as the hub's (SPLIT-00000-of-00002.parquet): in a
    folder of the dataset's name, in `data`, or directly, but not where different names would share them.
    A single file is the split that is tested.
    """
    if leaf.grouped:
        raise DataError(_in_vain(leaf.path, leaf))
    place = Path(data[leaf.path])
    said = f"evaluate.data: {leaf.path}: {place}"
    if place.is_file():
        if others := sorted(set(leaf.splits) - {leaf.tested}):
            raise DataError(
                f"{said} is one file, and {leaf.task} needs {', '.join(others)} beside {leaf.tested}; name a folder "
                f"with {leaf.tested}.jsonl, {others[0]}.jsonl and so on"
            )
        if _builder(place) is None:
            raise DataError(f"{said}: expected a name that ends in {_endings()}")
        return {leaf.tested: [str(place.resolve())]}
    if not place.is_dir():
        raise DataError(f"{said}: no such folder or file")
    named = [place / leaf.name] if leaf.name else []
    shared = [] if len(several[leaf.path]) > 1 else [place / "data", place]
    places = [folder for folder in (*named, *shared) if folder.is_dir()]
    for folder in places:
        for endings in BUILDERS.values():
            found = {split: _of_split(folder, split, endings) for split in leaf.splits}
            if all(found.values()):
                return found
    if not places:
        raise DataError(f"{said} has no folder {leaf.name}; {leaf.path} has several parts, each in a folder of its own")
    held = sorted(file.name for file in places[0].iterdir())
    lacking = [split for split in leaf.splits if not any(_of_split(places[0], split, e) for e in BUILDERS.values())]
    raise DataError(
        f"{said}: {leaf.task} needs {', '.join(lacking or leaf.splits)}, as files of one kind such as "
        f"{(lacking or leaf.splits)[0]}.jsonl ({_endings()}); {places[0]} holds {', '.join(held[:6]) or 'nothing'}"
    )


def _in_vain(path: str, leaf: Leaf) -> str:
    how = "as its group says" if leaf.grouped else "by code of its own"
    return (
        f"evaluate.data: {path}: {leaf.task} reads it {how}, and cannot be given files; leave it out of evaluate.data, "
        "and have it in the datasets cache when offline"
    )


def _of_split(folder: Path, split: str, endings: Sequence[str]) -> list[str]:
    form = re.compile(rf"{re.escape(split)}(?:-\d+-of-\d+)?\.(?:{'|'.join(map(re.escape, endings))})")
    return sorted(str(file.resolve()) for file in folder.iterdir() if form.fullmatch(file.name))


def _builder(file: Path) -> str | None:
    """What `datasets` reads such files with."""
    return next(
        (name for name, endings in BUILDERS.items() if file.name.endswith(tuple(f".{e}" for e in endings))), None
    )


def _endings() -> str:
    return ", ".join(f".{ending}" for endings in BUILDERS.values() for ending in endings)


def _over(entry: Any, leaf: Leaf, files: Mapping[str, list[str]]) -> Any:
    """The entry with its definition over these files; all else in it stays."""
    from lm_eval.tasks._yaml_loader import load_yaml

    source = {
        "dataset_path": _builder(Path(files[leaf.tested][0])),
        "dataset_name": None,
        "dataset_kwargs": {"data_files": dict(files)},
    }
    return replace(entry, yaml_path=None, cfg=load_yaml(entry.yaml_path) | source)


def _is_here(leaf: Leaf) -> bool:
    """Whether `datasets` reads it without the hub: files named in the definition, a folder, or its cache."""
    import datasets
    from datasets.naming import camelcase_to_snakecase

    if Path(leaf.path).exists():
        return True
    if leaf.files:
        return all(_matching([file]) for file in leaf.files)
    owner, _, name = leaf.path.rpartition("/")
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "___".join(filter(None, (owner, camelcase_to_snakecase(name))))
    wanted = [glob.escape(leaf.name), f"{glob.escape(leaf.name)}-*"] if leaf.name else ["*"]
    return any(any(folder.glob(f"{part}/*/*/dataset_info.json")) for part in wanted)
