"""The filter, run by a small interpreter of classic BPF, so that both machine types are tested on either."""

from __future__ import annotations

import errno
import struct

import pytest

from temper.sandbox.filter import (
    ALLOW,
    ARCHITECTURES,
    CLONE,
    CLONE3,
    DENIED,
    DENY,
    IOCTL,
    KILL,
    SOCKET,
    SOCKETPAIR,
    UNKNOWN,
    filter_program,
)

MACHINES = list(ARCHITECTURES)
OPEN_AT = {"x86_64": 257, "aarch64": 56}


def judge(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    architecture = ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("=iIQ6Q", number, architecture, 0, *(*arguments, *[0] * 6)[:6])
    program = list(struct.iter_unpack("=HBBI", filter_program(machine)))
    value, place = 0, 0
    while True:
        operation, if_true, if_false, operand = program[place]
        place += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
            place += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_every_named_call_is_denied_and_ordinary_ones_pass(machine: str) -> None:
    column = MACHINES.index(machine)
    for name, numbers in DENIED.items():
        if numbers[column] is not None:
            assert judge(machine, numbers[column]) == DENY, name
    assert judge(machine, OPEN_AT[machine]) == ALLOW
    assert judge(machine, CLONE3[column]) == UNKNOWN
    assert (DENY & 0xFFFF, UNKNOWN & 0xFFFF) == (errno.EPERM, errno.ENOSYS)


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_are_judged_by_their_arguments(machine: str) -> None:
    column = MACHINES.index(machine)
    threads, fork = 0x3D0F00, 0x1200011
    for flags in (threads, fork):
        assert judge(machine, CLONE[column], flags) == ALLOW
        for bit in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
            assert judge(machine, CLONE[column], flags | bit) == DENY, hex(bit)
    for call in (SOCKET, SOCKETPAIR):
        assert [judge(machine, call[column], family) == ALLOW for family in (0, 1, 2, 10, 16, 17, 38, 40)] == [
            False, True, False, False, False, False, False, False
        ]  # fmt: skip
    assert judge(machine, IOCTL[column], 0, 0x5413) == ALLOW
    assert judge(machine, IOCTL[column], 0, 0x5412) == judge(machine, IOCTL[column], 0, 0x541C) == DENY


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_of_another_machine_type_kill(machine: str) -> None:
    for other in (0x40000003, 0x40000028, *(a for m, a in ARCHITECTURES.items() if m != machine)):
        assert judge(machine, OPEN_AT[machine], architecture=other) == KILL
    if machine == "x86_64":
        assert judge(machine, 0x40000000 + 101) == KILL, "x32's ptrace"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_fits_the_pipe_and_the_kernel(machine: str) -> None:
    assert len(filter_program(machine)) % 8 == 0
    assert len(filter_program(machine)) // 8 < 4096


def test_no_number_is_named_twice() -> None:
    for column in range(2):
        numbers = [pair[column] for pair in DENIED.values() if pair[column] is not None]
        numbers += [call[column] for call in (CLONE, CLONE3, SOCKET, SOCKETPAIR, IOCTL)]
        assert len(numbers) == len(set(numbers))
