"""The second layer, for machines where user namespaces are closed: Landlock for files, seccomp for all else.

No package on PyPI was fit (docs/seams.md says why), so confine.py uses the kernel's Landlock and the system's
libseccomp itself. Weaker than bubblewrap, and named so to users: see WEAKER.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradeflow.errors import SetupError
from gradeflow.sandbox import bubblewrap

CONFINE = Path(__file__).with_name("confine.py")
OLDEST_ABI = 3  # before it, files that can be read can be cut to nothing
LIBSECCOMP = "libseccomp.so.2"
CREATE_RULESET, VERSION = 444, 1
NAMES_OF = "names:"  # confine.py has it too
# What the self-test finds open and is lived with, in its words.
ACCEPTED = frozenset({"names of the host's files are in sight", "its user is root"})
WEAKER = (
    "code sees the size of a file whose path it knows, keeps its user (root: without capabilities), and starts no "
    "other processes; the host counts its threads from time to time"
)


def find() -> str:
    """What isolates here, in words.

    Raises:
        SetupError: the kernel or the library is missing, and how to get it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(ctypes.c_long(CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION))
    if abi < OLDEST_ABI:
        has = "the kernel's Landlock is missing or switched off" if abi < 0 else f"the kernel's Landlock is ABI {abi}"
        raise SetupError(
            f"{has}; ABI {OLDEST_ABI} is needed: Linux 6.2 or later with landlock among the security modules "
            "(/sys/kernel/security/lsm; the kernel parameter lsm=landlock,... adds it)"
        )
    try:
        ctypes.CDLL(LIBSECCOMP)
    except OSError:
        raise SetupError(
            f"{LIBSECCOMP} is missing: `apt install libseccomp2`, `dnf install libseccomp` or its like"
        ) from None
    return f"Landlock (ABI {abi}) and libseccomp"


def arguments(*, folder: Path, with_packages: bool, readable: Sequence[str] = ()) -> list[str]:
    """The command line up to the command that it runs."""
    top_level = [name for name in ("/bin", "/lib", "/lib32", "/lib64") if Path(name).is_dir()]
    shown = dict.fromkeys([*bubblewrap.shown(with_packages=with_packages), *map(os.path.realpath, top_level)])
    system = [each for place in shown for each in around(place, bubblewrap.OWN)]
    python = [bubblewrap.python(), *bubblewrap.PYTHON_FLAGS]
    return [*python, str(CONFINE), str(folder), *dict.fromkeys([*system, *readable]), "--"]


def around(place: str, hidden: str) -> Iterator[str]:
    """All of a folder but what is hidden in it; of the folders above that, only the names can be read."""
    if Path(place) not in Path(hidden).parents:
        yield place
        return
    yield f"{NAMES_OF}{place}"
    for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
        if entry.path != hidden:
            yield from around(entry.path, hidden)


def remedy(said: str) -> str:
    """What to do about a complaint of confine.py on this machine."""
    if "Permission denied" in said:
        return f"{bubblewrap.python()} and its libraries must be readable for the user that runs this"
    return "a container may forbid it: `--security-opt seccomp=unconfined` allows Landlock and seccomp inside"
