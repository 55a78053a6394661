"""The fields of a published row. What does not fit is a DataError: which field, what it holds, what it should hold.

Text that cannot be written as UTF-8 (half of a surrogate pair) is refused, since no file could keep it.
"""

import ast
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gradeflow.errors import DataError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    return "nothing" if value is None else _SHORT.repr(value)


def text(row: Mapping[str, Any], *keys: str) -> str:
    """The first of `keys` that the row has, as text that is not empty."""
    for key in keys:  # written out, since all rows come through here
        if isinstance(value := row.get(key), str) and (value.isascii() or _has_utf8(value)) and value.strip():
            return value
    held = next((key for key in keys if row.get(key) is not None), None)
    if held is None:
        raise DataError(f"field {' or '.join(keys)}: missing; expected text")
    raise DataError(f"field {held}: holds {shown(row[held])}; expected text that is not empty")


def label(row: Mapping[str, Any], key: str) -> str:
    """The answer of a row, as text; test splits are often published without."""
    if row.get(key) in (None, "", -1):
        raise DataError(f"field {key}: the row has no answer, as in splits published without; take another split")
    return text(row, key)


def kept(row: Mapping[str, Any], *keys: str, **renamed: str) -> dict[str, str]:
    """Those of `keys` that the row has, as text that may be empty; `renamed` gives fields another name."""
    names = dict(zip(keys, keys, strict=True)) | renamed
    found = {name: row[key] for name, key in names.items() if row.get(key) is not None}
    for name, value in found.items():
        if not _writable(value):
            raise DataError(f"field {names[name]}: holds {shown(value)}; expected text")
    return found


def whole(value: Any, field: str) -> int | str:
    """A whole number, or the text that stands for one in some forms."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if _filled(value):
        return str(value)
    raise DataError(f"field {field}: holds {shown(value)}; expected a whole number or text")


def texts(value: Any, field: str) -> list[str]:
    if not _is_list(value) or not all(map(_writable, value)):
        raise DataError(f"field {field}: holds {shown(value)}; expected a list of texts")
    return list(value)


def mapping(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"field {field}: holds {shown(value)}; expected an object")
    return value


def items(value: Any, field: str) -> Sequence[Any]:
    if not _is_list(value):
        raise DataError(f"field {field}: holds {shown(value)}; expected a list")
    return list(value)


def multiple_choice(question: str, labels: Sequence[str], said: Sequence[str]) -> str:
    """The question with its choices, as it is asked: `... Choices: A. ... B. ...`."""
    if len(labels) < 2:
        raise DataError("field choices: empty; expected two or more")
    if len(labels) != len(said):
        raise DataError(f"field choices: {len(labels)} labels for {len(said)} texts")
    for values in (labels, said):
        plain = [value.strip() for value in values]
        if "" in plain:
            raise DataError(f"field choices: {shown(list(values))} has an empty one")
        if len(set(plain)) < len(plain):
            raise DataError(f"field choices: {shown(list(values))} has one of them twice")
    return f"{question} Choices: " + " ".join(f"{label}. {text}" for label, text in zip(labels, said, strict=True))


def python(code: str, field: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"field {field}: holds {shown(code)}; expected Python ({error})") from None


def _filled(value: Any) -> bool:
    return _writable(value) and bool(value.strip())


def _writable(value: Any) -> bool:
    return isinstance(value, str) and (value.isascii() or _has_utf8(value))


def _has_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
