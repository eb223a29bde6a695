"""The seccomp filter: which system calls a sandboxed program may not make.

Owns: one classic BPF program per machine type, as bytes. Refuses: machine types it has no call numbers for.
Namespaces already hide the host; the filter removes kernel surface that could break the namespaces themselves.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_*: a call made under another architecture's numbers (32-bit) would slip past every comparison below."""

DENIED: dict[str, tuple[int | None, int | None]] = {
    # name: (x86_64, aarch64); None where the machine has no such call
    # Other processes' memory and descriptors.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # The mount table and the way out of a root folder.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # Namespaces; clone is judged by its flags below.
    "setns": (308, 268), "unshare": (272, 97),
    # The kernel's keys, programs, counters, modules, clock, log, names, accounting.
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "syslog": (103, 116), "sethostname": (170, 161),
    "setdomainname": (171, 162), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "personality": (135, 92), "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "uselib": (134, None), "_sysctl": (156, None), "create_module": (174, None),
    "get_kernel_syms": (177, None), "query_module": (178, None), "nfsservctl": (180, 42), "lookup_dcookie": (212, 18),
    # Large and often broken parts of the kernel that a Python program does not need.
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_setup": (206, 0), "fanotify_init": (300, 262), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # Memory that no process shows as its own, so that the watcher could not count it.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip

CLONE, CLONE3, SOCKET, SOCKETPAIR, IOCTL = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29)
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET."""
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX type into a terminal as if its user had."""
X32_CALLS = 0x40000000
"""From here on are x86_64's second set of numbers for the same calls."""

ALLOW, KILL = 0x7FFF0000, 0x80000000
DENY, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def filter_program(machine: str, families: Sequence[int] = (AF_UNIX,)) -> bytes:
    """struct sock_filter[] for `machine`, as bwrap's --seccomp reads it. `families` of sockets may be opened."""
    column = list(ARCHITECTURES).index(machine)
    program = [
        _code(LOAD, ARCHITECTURE),
        *_unless(EQUAL, ARCHITECTURES[machine], KILL),
        _code(LOAD, NUMBER),
    ]
    if machine == "x86_64":
        program += _when(AT_LEAST, X32_CALLS, KILL)
    program += _when(EQUAL, CLONE3[column], UNKNOWN)  # its flags lie in memory: libc falls back to clone
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            program += _when(EQUAL, number, DENY)
    program += _judged(CLONE[column], FIRST_ARGUMENT, _when(ANY_BIT, NEW_NAMESPACES, DENY))
    for call in (SOCKET, SOCKETPAIR):
        allowed = [code for family in families for code in _when(EQUAL, family, ALLOW)]
        program += _judged(call[column], FIRST_ARGUMENT, [*allowed, _code(RETURN, DENY)])
    requests = [code for request in TERMINAL_INJECTION for code in _when(EQUAL, request, DENY)]
    program += _judged(IOCTL[column], SECOND_ARGUMENT, requests)
    return b"".join([*program, _code(RETURN, ALLOW)])


def _code(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _when(test: int, value: int, action: int) -> list[bytes]:
    return [_code(test, value, 0, 1), _code(RETURN, action)]


def _unless(test: int, value: int, action: int) -> list[bytes]:
    return [_code(test, value, 1, 0), _code(RETURN, action)]


def _judged(number: int, argument: int, judgement: list[bytes]) -> list[bytes]:
    """For this call only: look at the low half of one argument, and allow what the judgement lets pass."""
    body = [_code(LOAD, argument), *judgement, _code(RETURN, ALLOW)]
    return [_code(EQUAL, number, 0, len(body)), *body]
