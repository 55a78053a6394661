"""Keeps credentials out of what is written down."""

import re
from collections.abc import Collection, Mapping
from typing import Any

REDACTED = "***REDACTED***"
SHORTEST = 8  # a shorter "secret", such as the usual EMPTY, would blank out ordinary words

NAMES = re.compile(
    r"(?:.*[_-])?(?:api[_-]?key|secret[_-]?(?:access[_-]?)?key|secret|password|passwd|authorization|credentials?"
    r"|(?:access|auth|bearer|refresh|session)[_-]?token|token)",
    re.IGNORECASE,
)
SHAPES = re.compile(
    r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"
    r"|\bhf_[A-Za-z0-9]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{16,}=*"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def redact(value: Any, secrets: Collection[str] = ()) -> Any:
    """A copy of a JSON value without the given secrets, without what looks like one, or is named as one."""
    match value:
        case str():
            for secret in sorted(filter(lambda text: len(text) >= SHORTEST, secrets), key=len, reverse=True):
                value = value.replace(secret, REDACTED)
            return SHAPES.sub(REDACTED, value)
        case Mapping():
            return {
                redact(name, secrets): REDACTED
                if item and isinstance(item, str) and NAMES.fullmatch(str(name))
                else redact(item, secrets)
                for name, item in value.items()
            }
        case list() | tuple():
            return [redact(item, secrets) for item in value]
        case _:
            return value
