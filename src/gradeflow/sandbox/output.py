"""Files that model-written code left in its working folder: read as data, never followed out of it."""

import contextlib
import os
import stat
import sys
from collections.abc import Iterable
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
    """Bytes that a folder takes on disk; each entry counts for at least 4 KiB, and links are not followed.

    A folder inside that its owner has closed could hold anything, and so counts for more than any limit.
    """
    total, open_folders = 0, [folder]
    while open_folders:
        try:
            entries = list(os.scandir(open_folders.pop()))
        except PermissionError:
            return sys.maxsize
        except OSError:  # it is gone
            continue
        for entry in entries:
            with contextlib.suppress(OSError):
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, 4096)
                if entry.is_dir(follow_symlinks=False):
                    open_folders.append(Path(entry))
    return total


def unlinked_size(processes: Iterable[Path], folder: Path) -> int:
    """Bytes on the folder's disk in files without a name that a process, a folder of /proc each, still holds open."""
    sizes = {}
    for descriptors in (process / "fd" for process in processes):
        for name in names(descriptors):
            with contextlib.suppress(OSError):  # it ended or closed the file meanwhile
                found, device = (descriptors / name).stat(), folder.stat().st_dev
                if found.st_nlink == 0 and found.st_dev == device and stat.S_ISREG(found.st_mode):
                    sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def names(folder: Path) -> list[str]:
    """What a folder holds; nothing once it is gone."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - its names, not paths
    except OSError:
        return []


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
