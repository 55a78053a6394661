"""Which system calls are refused inside: those that reach past the namespaces and the limits of a run.

Keyrings belong to a user, so runs would share them; vsock leads out of a virtual machine from any network namespace;
what memfd and System V hold is counted by no limit once it is unmapped; a file with the set-user-ID bit would stay in
a working folder in the name of the host's user. Scripts have no use for the rest either.
"""

import errno
import functools
import platform
import struct

from gradeflow.errors import SetupError

FAMILIES = (1, 2, 10, 16)  # UNIX, INET, INET6, NETLINK: the ones that a network namespace keeps in
REFUSED = {
    "x86_64": {
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "memfd_create": 319,
        "memfd_secret": 447,
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
        "io_uring_setup": 425,
    },
    "aarch64": {
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "memfd_create": 279,
        "memfd_secret": 447,
        "shmget": 194,
        "semget": 190,
        "msgget": 186,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "io_uring_setup": 425,
    },
}
SOCKET = {"x86_64": 41, "aarch64": 198}
CHMOD = {  # and where its mode is
    "x86_64": {90: 24, 91: 24, 268: 32, 452: 32},
    "aarch64": {52: 24, 53: 32, 452: 32},
}
SET_USER_ID = 0o4000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # the numbers of x86_64's second set of calls begin here

NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in what the kernel shows a filter
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000


@functools.cache
def program() -> bytes:
    """The filter in the kernel's classic BPF, as bubblewrap's --seccomp takes it."""
    machine = platform.machine()
    if machine not in REFUSED:
        raise SetupError(f"the sandbox has no filter of system calls for {machine}; it has for {', '.join(REFUSED)}")
    return b"".join(struct.pack("=HBBI", *step) for step in _steps(machine))


def _steps(machine: str) -> list[tuple[int, int, int, int]]:
    """Each is operation, steps to skip if true, steps to skip if false, and operand."""
    refuse, allow = (RETURN, 0, 0, FAIL | errno.EPERM), (RETURN, 0, 0, ALLOW)
    steps = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, AUDIT_ARCH[machine]), refuse, (LOAD, 0, 0, NUMBER)]
    steps += [(AT_LEAST, 0, 1, X32), refuse]
    for number in REFUSED[machine].values():
        steps += [(EQUAL, 0, 1, number), refuse]
    for number, mode in CHMOD[machine].items():
        steps += [(EQUAL, 0, 4, number), (LOAD, 0, 0, mode), (ANY_BIT, 0, 1, SET_USER_ID), refuse, allow]
    steps += [(EQUAL, 0, len(FAMILIES) + 2, SOCKET[machine]), (LOAD, 0, 0, FIRST_ARGUMENT)]
    steps += [(EQUAL, len(FAMILIES) - at, 0, family) for at, family in enumerate(FAMILIES)]
    return [*steps, (RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT), allow]
