"""Profiles: many settings changed at once, in params.yaml itself, where git and DVC see it.

A profile, profiles/NAME.yaml, is a part of params.yaml's tree and is laid over it by one rule:

- a section (`train`, `train.lora`, ...) is merged: settings that the profile does not name stay;
- everything else is replaced whole: values, lists, and maps whose keys are free (`fetch`, `models`, `mix.weights`,
  `mix.type_ratios`). What a profile mixes is what it names, never that plus what was there before.
"""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark
from ruamel.yaml.tokens import CommentToken

from gradeflow.commands import original
from gradeflow.commands.yaml_file import plain, read, replace_file, round_trip
from gradeflow.errors import SettingsError
from gradeflow.params import Params, validate


def main(params: Params, *, action: str, names: list[str]) -> None:  # noqa: ARG001 - as every command is called
    """`list`, `use NAME`, or `import TRAINING_YAML [AFLOW_YAML]`: change params.yaml and say what has changed."""
    root = Path()
    match action, names:
        case "list", []:
            print("\n".join(available(root)))
        case "use", [name]:
            print("\n".join(use(name, root)) or "nothing to change")
        case "import", [training, *aflow] if len(aflow) <= 1:
            imported = original.import_original(Path(training), *(Path(file) for file in aflow))
            changes = apply(imported.patch, root / "params.yaml", origin=training)
            print("\n".join(f"{note.key} -> {note.to or 'dropped'}: {note.reason}" for note in imported.notes))
            print("\n".join(changes) or "nothing to change")
        case _:
            raise SettingsError("usage: gradeflow profile list | use NAME | import training.yaml [aflow_llm.yaml]")


def available(root: Path) -> list[str]:
    return sorted(path.stem for path in (root / "profiles").glob("*.yaml"))


def use(name: str, root: Path) -> list[str]:
    """Lay a profile over root/params.yaml; returns a line `setting: old -> new` for each change.

    Raises:
        SettingsError: no such profile, or the result would not fit the schema; nothing is written then.
    """
    if name not in available(root):
        raise SettingsError(f"no profile {name!r}; there are: {', '.join(available(root)) or 'none'} (in profiles/)")
    return apply(read(root / "profiles" / f"{name}.yaml"), root / "params.yaml", origin=f"profile {name}")


def apply(patch: Mapping[str, Any], path: Path, origin: str = "patch") -> list[str]:
    """Lay `patch` over the settings file `path`, comments and order kept, in one atomic step."""
    path = path.resolve()
    tree = read(path)
    changes = list(_merge(tree, patch, Params, ""))
    buffer = io.StringIO()
    round_trip().dump(tree, buffer)
    validate(YAML(typ="safe", pure=True).load(buffer.getvalue()), origin=f"{path.name} with {origin}")
    if changes:
        replace_file(path, buffer.getvalue())
    return changes


def _merge(tree: CommentedMap, patch: Mapping[str, Any], section: type[BaseModel], prefix: str) -> Iterator[str]:
    for key, value in patch.items():
        field = section.model_fields.get(key)
        inner = field.annotation if field else None
        old = tree.get(key)
        if isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(old, CommentedMap):
            if not isinstance(value, Mapping):
                raise SettingsError(f"{prefix}{key} is {value!r}; expected a section")
            yield from _merge(old, value, inner, f"{prefix}{key}.")
        elif isinstance(old, CommentedMap) and isinstance(value, Mapping):
            yield from _replace_map(old, value, f"{prefix}{key}.")
        elif not _same(old, value):
            yield f"{prefix}{key}: {_text(old)} -> {_text(value)}"
            tree[key] = _like(old, value)


def _replace_map(old: CommentedMap, new: Mapping[str, Any], prefix: str) -> Iterator[str]:
    if _same(old, new):
        return
    tail = _take_tail(old)
    for key in [key for key in old if key not in new]:
        yield f"{prefix}{key}: {_text(old.pop(key))} -> (gone)"
    for key, value in new.items():
        if key not in old or not _same(old[key], value):
            yield f"{prefix}{key}: {_text(old[key]) if key in old else '(new)'} -> {_text(value)}"
            old[key] = _like(old.get(key), value)
    _put_tail(old, tail)


def _like(old: Any, value: Any) -> Any:
    """`value` without the comments of its own file, in the style (flow or block) of what it replaces."""
    if isinstance(value, Mapping):
        fresh: Any = CommentedMap((key, _like(None, part)) for key, part in value.items())
    elif isinstance(value, list | tuple):
        fresh = CommentedSeq(_like(None, part) for part in value)
        fresh.fa.set_flow_style()
    elif type(value) is float and "." not in repr(value):
        return round_trip().load(repr(value).replace("e", ".0e"))  # to PyYAML 1e-05 is text, 1.0e-05 a number
    else:
        return value
    if isinstance(old, type(fresh)) and old.fa.flow_style():
        fresh.fa.set_flow_style()
    return fresh


def _last(tree: CommentedMap) -> tuple[CommentedMap, Any] | None:
    """The innermost block map at the end of `tree`, and its last key: ruamel keeps what follows there."""
    key = next(reversed(tree), None)
    if key is None or tree.fa.flow_style():
        return None
    inner = tree[key]
    return (_last(inner) if isinstance(inner, CommentedMap) else None) or (tree, key)


def _take_tail(tree: CommentedMap) -> str:
    """Cut off the blank lines and comments between this map and what follows it."""
    found = _last(tree)
    token = found[0].ca.items.get(found[1], [None] * 4)[2] if found else None
    if token is None:
        return ""
    own, _, tail = token.value.partition("\n")
    token.value = f"{own}\n"
    return str(tail)


def _put_tail(tree: CommentedMap, tail: str) -> None:
    found = _last(tree)
    if not tail or found is None:
        return
    owner, key = found
    kept = owner.ca.items.setdefault(key, [None, None, None, None])
    if kept[2] is None:
        kept[2] = CommentToken("\n", CommentMark(0), None)
    kept[2].value += tail


def _same(old: Any, new: Any) -> bool:
    return plain(old) == plain(new) and isinstance(old, bool) == isinstance(new, bool)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return '""' if value in {"", None} else str(value).lower() if isinstance(value, bool) else f"{value}"
