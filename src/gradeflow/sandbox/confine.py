"""Confines itself by Landlock and seccomp, then becomes the program that it is given.

    python confine.py WORKING_FOLDER READABLE... -- PROGRAM ARGUMENT...

Standard library and the system's libseccomp only; the host never imports it. What it lets through is one process,
threads included, without children: so nothing outlives a run, and no process limit is needed. System calls that are
not named here do not exist inside. Changes of mode, owner and times, which Landlock does not govern, are told to
have succeeded and do nothing, because much that copies files would stop at a refusal.
"""

# ruff: noqa: PTH112 - each start pays for what is imported here, so few modules are

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys

LIBSECCOMP = "libseccomp.so.2"
NAMES_OF = "names:"  # in front of a folder of which only the names may be read

# Of Landlock; the numbers of its system calls are the same on every architecture
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 10, 1 << 11
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
SINCE_ABI_3 = (1 << 15) - 1
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
READ = EXECUTE | READ_FILE | READ_DIR
WORK = SINCE_ABI_3 & ~(EXECUTE | MAKE_CHAR | MAKE_SOCK | MAKE_FIFO | MAKE_BLOCK)
# `status` and `statm` tell the interpreter of its own limits.
SINGLE_FILES = {
    "/dev/null": READ_FILE | WRITE_FILE,
    "/dev/zero": READ_FILE,
    "/dev/urandom": READ_FILE,
    "/proc/self/status": READ_FILE,
    "/proc/self/statm": READ_FILE,
}

# of prctl
PR_SET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 15, 16, 24, 38
PR_SET_VMA = 0x53564D41
CAPABILITY_VERSION_3 = 0x20080522

# of libseccomp
ALLOW, FAIL = 0x7FFF0000, 0x00050000
EQUAL, MASKED_EQUAL = 4, 7
CLONE_THREAD = 0x10000
AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF

PLAIN = """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile copy_file_range splice
    open openat openat2 creat close close_range dup dup2 dup3 pipe pipe2
    stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat
    getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2
    link linkat symlink symlinkat truncate ftruncate fallocate fsync fdatasync flock fadvise64 umask
    select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4
    getsockname getpeername getsockopt shutdown recvfrom recvmsg sendmsg
    brk mmap munmap mprotect mremap madvise mincore msync mlock munlock membarrier get_mempolicy
    futex futex_waitv get_robust_list set_robust_list set_tid_address rseq arch_prctl
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack restart_syscall
    pause alarm setitimer getitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
    getpid getppid gettid getuid geteuid getgid getegid getgroups getresuid getresgid getpgrp getpgid getsid
    getpriority sched_yield sched_getaffinity sched_getparam sched_getscheduler
    sched_get_priority_max sched_get_priority_min getcpu getrusage getrlimit setrlimit sysinfo uname getrandom
    execve execveat exit exit_group wait4 waitid
"""
IGNORED = """
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
"""
UNSUPPORTED = """
    setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
"""
# F_SETOWN, F_SETSIG and their kin would send signals for it.
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal or not, its size, bytes waiting, flags


class Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class Compared(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    found: int = libc.syscall(ctypes.c_long(number), *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return found


def prctl(*arguments: int) -> None:
    if libc.prctl(*(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:5])) < 0:
        raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}: {os.strerror(ctypes.get_errno())}")


def abi() -> int:
    """The version of the kernel's Landlock; 0 without it."""
    return max(0, int(libc.syscall(ctypes.c_long(CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def restrict_files(folder: str, readable: list[str]) -> None:
    version = abi()
    fs = SINCE_ABI_3 | (IOCTL_DEV if version >= 5 else 0)
    ruleset = Ruleset(fs, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    rules = call(CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(ctypes.sizeof(ruleset)), ctypes.c_uint32(0))
    asked = {path.removeprefix(NAMES_OF): READ_DIR if path.startswith(NAMES_OF) else READ for path in readable}
    for path, rights in {**asked, **SINGLE_FILES, folder: WORK}.items():
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = rights if os.path.isdir(path) else rights & OF_FILES
        rule = Beneath(allowed, descriptor)
        call(ADD_RULE, ctypes.c_int(rules), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
        os.close(descriptor)
    call(RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    os.close(rules)


def drop_capabilities() -> None:
    """Root keeps its name and loses its power; the bounding set goes too, or `execve` would give it back."""
    with open("/proc/sys/kernel/cap_last_cap") as file:  # noqa: PTH123
        last = int(file.read())
    if os.geteuid() == 0:
        for capability in range(last + 1):
            prctl(PR_CAPBSET_DROP, capability)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (Capabilities * 2)()
    if libc.capset(ctypes.byref(header), ctypes.byref(none)) < 0:
        raise OSError(ctypes.get_errno(), "capset failed")


class Filter:
    """An allowlist of system calls; whatever is not on it does not exist."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBSECCOMP)
        self.library.seccomp_init.restype = ctypes.c_void_p
        self.context = ctypes.c_void_p(self.library.seccomp_init(ctypes.c_uint32(FAIL | errno.ENOSYS)))

    def add(self, action: int, name: str, *conditions: tuple[int, int, int, int]) -> None:
        number = self.library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # not known here, or not there on this architecture
            return
        compared = (Compared * len(conditions))(*(Compared(*condition) for condition in conditions))
        code = self.library.seccomp_rule_add_array(
            self.context, ctypes.c_uint32(action), number, ctypes.c_uint(len(conditions)), compared
        )
        if code < 0:
            raise OSError(-code, f"seccomp rule for {name}: {os.strerror(-code)}")

    def load(self) -> None:
        if (code := self.library.seccomp_load(self.context)) < 0:
            raise OSError(-code, f"seccomp filter: {os.strerror(-code)}")


def restrict_calls() -> None:
    allowed = Filter()
    for name in PLAIN.split():
        allowed.add(ALLOW, name)
    for name in IGNORED.split():
        allowed.add(FAIL | 0, name)
    for name in UNSUPPORTED.split():
        allowed.add(FAIL | errno.ENOTSUP, name)
    for command in FCNTL:
        allowed.add(ALLOW, "fcntl", (1, EQUAL, command, 0))
    for command in IOCTL:
        allowed.add(ALLOW, "ioctl", (1, EQUAL, command, 0))
    for option in (PR_SET_NAME, PR_GET_NAME, PR_SET_VMA):
        allowed.add(ALLOW, "prctl", (0, EQUAL, option, 0))
    for name in ("kill", "tgkill"):
        allowed.add(ALLOW, name, (0, EQUAL, os.getpid(), 0))
    allowed.add(ALLOW, "prlimit64", (0, EQUAL, 0, 0))
    allowed.add(ALLOW, "sendto", (4, EQUAL, 0, 0))
    allowed.add(ALLOW, "socketpair", (0, EQUAL, AF_UNIX, 0), (1, MASKED_EQUAL, SOCK_TYPE_MASK, SOCK_STREAM))
    allowed.add(ALLOW, "clone", (0, MASKED_EQUAL, CLONE_THREAD, CLONE_THREAD))
    allowed.add(FAIL | errno.EAGAIN, "clone", (0, MASKED_EQUAL, CLONE_THREAD, 0))
    allowed.add(FAIL | errno.EAGAIN, "fork")
    allowed.add(FAIL | errno.EAGAIN, "vfork")
    allowed.load()


def main() -> None:
    end = sys.argv.index("--")
    folder, *readable = sys.argv[1:end]
    program = sys.argv[end + 1 :]
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    restrict_files(folder, readable)
    restrict_calls()
    os.execv(program[0], program)  # noqa: S606 - what this program is for


main()
