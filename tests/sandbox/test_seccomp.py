import struct

import pytest

from gradeflow.errors import SetupError
from gradeflow.sandbox import seccomp


@pytest.mark.parametrize("machine", seccomp.REFUSED)
def test_every_jump_lands_inside_the_filter(machine: str) -> None:
    """The kernel refuses a filter otherwise, on a machine that no test may have run on."""
    steps = seccomp._steps(machine)
    for at, (operation, if_true, if_false, _) in enumerate(steps):
        assert operation == seccomp.RETURN or at + 1 + max(if_true, if_false) < len(steps)
    assert steps[-1] == (seccomp.RETURN, 0, 0, seccomp.ALLOW)


def verdict(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the filter says of a call, as the kernel would run it."""
    shown = struct.pack("=iIQ", number, seccomp.AUDIT_ARCH[machine] if arch is None else arch, 0)
    shown += struct.pack("=6Q", *arguments, *[0] * (6 - len(arguments)))
    steps, at, held = seccomp._steps(machine), 0, 0
    while True:
        operation, if_true, if_false, operand = steps[at]
        if operation == seccomp.RETURN:
            return operand
        if operation == seccomp.LOAD:
            (held,) = struct.unpack_from("=I", shown, operand)
            at += 1
        else:
            found = {
                seccomp.EQUAL: held == operand,
                seccomp.AT_LEAST: held >= operand,
                seccomp.ANY_BIT: bool(held & operand),
            }[operation]
            at += 1 + (if_true if found else if_false)


@pytest.mark.parametrize("machine", seccomp.REFUSED)
def test_only_what_is_named_is_refused(machine: str) -> None:
    socket = seccomp.SOCKET[machine]
    refused = {number for number in range(600) if verdict(machine, number, 2) != seccomp.ALLOW}
    assert refused == set(seccomp.REFUSED[machine].values())
    assert {family for family in range(64) if verdict(machine, socket, family) == seccomp.ALLOW} == {1, 2, 10, 16}
    for number, offset in seccomp.CHMOD[machine].items():
        before = [0] * ((offset - seccomp.FIRST_ARGUMENT) // 8)
        assert verdict(machine, number, *before, 0o2755) == seccomp.ALLOW
        assert verdict(machine, number, *before, 0o4755) != seccomp.ALLOW


@pytest.mark.parametrize("machine", seccomp.REFUSED)
def test_another_set_of_system_calls_is_refused_whole(machine: str) -> None:
    assert verdict(machine, 0, arch=0x40000003) != seccomp.ALLOW
    assert verdict(machine, seccomp.X32 + 1) != seccomp.ALLOW


def test_a_machine_without_a_filter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    seccomp.program.cache_clear()
    with pytest.raises(SetupError, match="abacus"):
        seccomp.program()
