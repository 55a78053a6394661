"""Files that model-written code left in its working folder: read as data, never followed out of it."""

import os
import stat
from pathlib import Path, PurePosixPath

from gradeflow.errors import GradeflowError


class RefusedOutputError(GradeflowError):
    """The file is missing, not a regular file, reached through a link, or too large."""


def read_output(folder: Path, name: str, limit_bytes: int) -> bytes:
    """The content of `folder/name`.

    Raises:
        RefusedOutputError: for links, FIFOs, folders, devices, names that leave the folder, and files that
            are missing or larger than `limit_bytes`.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise RefusedOutputError(f"{name!r}: not a name inside the working folder")
    try:
        descriptor = _open_inside(folder, parts)
    except OSError as error:
        raise RefusedOutputError(f"{name}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RefusedOutputError(f"{name}: not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise RefusedOutputError(f"{name}: larger than {limit_bytes} bytes")
    return content


def tree_size(folder: Path) -> int:
    """Bytes that a folder takes on disk; each entry counts for at least 4 KiB, and links are not followed."""
    total, open_folders = 0, [str(folder)]
    while open_folders:
        try:
            with os.scandir(open_folders.pop()) as entries:
                for entry in entries:
                    total += max(entry.stat(follow_symlinks=False).st_blocks * 512, 4096)
                    if entry.is_dir(follow_symlinks=False):
                        open_folders.append(entry.path)
        except OSError:  # what vanished or closed itself meanwhile is not counted
            continue
    return total


def _open_inside(folder: Path, parts: tuple[str, ...]) -> int:
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts[:-1]:
        try:
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        finally:
            os.close(place)
        place = deeper
    try:
        return os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    finally:
        os.close(place)
