"""A full disk, told in one way: torch, safetensors and pipes have words of their own for it, or none."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
LEAST_BYTES = 1 << 20


def said(error: OSError) -> str:
    """What the system says, and what to do where the disk is full."""
    return f"{error.strerror or error}{'; free some space' if error.errno in FULL else ''}"


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Let whatever breaks inside for lack of room in `folder` say so.

    Raises:
        OSError: ENOSPC, naming the folder.
    """
    try:
        yield
    except Exception as error:
        named = isinstance(error, OSError) and error.filename
        if named or _free_bytes(folder) >= LEAST_BYTES:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error


def _free_bytes(folder: Path) -> int:
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free
