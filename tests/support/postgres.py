"""A PostgreSQL server of one's own, from the system's programs, that ends with the test."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER = "gradeflow"


def programs() -> Path | None:
    """Where initdb and pg_ctl are; Debian keeps them out of the PATH."""
    debian = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
    return debian or ((found := shutil.which("initdb")) and Path(found).parent) or None


@contextmanager
def running() -> Iterator[str]:
    """The address of an empty database; it listens on a socket in a private folder alone."""
    place = programs()
    assert place
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:
        data = Path(folder) / "data"
        as_user = _as_nobody(Path(folder))
        subprocess.run(
            [*as_user, place / "initdb", "-D", data, "-U", USER, "-A", "trust", "--no-sync"],
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        control = [*as_user, place / "pg_ctl", "-D", data, "-s", "-w"]
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
        subprocess.run([*control, "-l", data / "log", "-o", options, "start"], check=True, cwd=folder)
        try:
            yield f"postgresql://{USER}@/postgres?host={folder}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=False, cwd=folder)


def _as_nobody(folder: Path) -> list[str]:
    """The server refuses to run as root."""
    if os.getuid() != 0:
        return []
    shutil.chown(folder, "nobody")
    return ["setpriv", "--reuid=nobody", "--clear-groups"]
