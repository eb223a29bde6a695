"""What a witness hears of, each thing by the call that does it, and what it must not take for something."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from temper.evals.witness import watching

FAR = ".".join("n" * 150)
"""Longer than a name may be: nobody is asked for it."""
ADDRESS = ("192.0.2.9", 9)


def datagram() -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.settimeout(0.2)
    return found


@pytest.mark.parametrize(
    ("act", "host"),
    [
        (lambda line: socket.getaddrinfo(FAR, 80), FAR),
        (lambda line: socket.gethostbyname(FAR), FAR),
        (lambda line: socket.gethostbyname_ex(FAR), FAR),
        (lambda line: socket.gethostbyaddr(FAR), FAR),
        (lambda line: socket.getnameinfo(ADDRESS, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV), ADDRESS[0]),
        (lambda line: line.sendto(b"x", ADDRESS), ADDRESS[0]),
        (lambda line: line.sendmsg([b"x"], [], 0, ADDRESS), ADDRESS[0]),
        (lambda line: line.connect(ADDRESS), ADDRESS[0]),
        (lambda line: line.connect_ex(ADDRESS), ADDRESS[0]),
    ],
    ids=["getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getnameinfo", "sendto", "sendmsg",
         "connect", "connect_ex"],
)  # fmt: skip
def test_an_address_that_is_called_or_looked_up_is_heard(act: Callable[[socket.socket], object], host: str) -> None:
    with datagram() as line, watching() as sight, contextlib.suppress(OSError):
        act(line)
    assert sight.called == {host}


def test_this_machine_is_no_other_one(tmp_path: Path) -> None:
    with datagram() as line, socket.socket(socket.AF_UNIX) as path, watching() as sight:
        line.sendto(b"x", ("127.0.0.1", 9))
        socket.getaddrinfo("localhost", 80)
        socket.getaddrinfo(None, 80)
        sys.audit("socket.gethostbyaddr", os.uname().nodename)  # as every HTTPServer does, and who asks may wait long
        with contextlib.suppress(OSError):
            path.connect(str(tmp_path / "nobody"))
    assert sight.called == set()


def bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)


@pytest.mark.parametrize(
    ("act", "changed"),
    [
        (lambda: open("new", "w").close(), {"new"}),
        (lambda: os.truncate("old", 0), {"old"}),
        (lambda: os.replace("old", "new"), {"old", "new"}),
        (lambda: os.rename("old", "new"), {"old", "new"}),
        (lambda: os.link("old", "new"), {"new"}),
        (lambda: os.symlink("/etc", "new"), {"new"}),
        (lambda: os.mkdir("new"), {"new"}),
        (lambda: os.remove("old"), {"old"}),
        (lambda: os.rmdir("folder"), {"folder"}),
        (lambda: sqlite3.connect("new").close(), {"new"}),
        (lambda: bind("new"), {"new"}),
    ],
    ids=["open", "truncate", "replace", "rename", "link", "symlink", "mkdir", "remove", "rmdir", "sqlite3", "bind"],
)
def test_a_file_that_is_changed_is_heard_by_all_its_names(
    act: Callable[[], None], changed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with watching() as sight:
        act()
    assert sight.changed == {str(tmp_path / name) for name in changed}
    assert sight.left_files == ([str(tmp_path / "new")] if "new" in changed else sight.left_files)


def test_names_below_an_open_folder_are_found_there(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with watching() as sight:
        os.mkdir("one", dir_fd=folder)
        os.rename("one", "two", src_dir_fd=folder, dst_dir_fd=folder)
        os.rmdir("two", dir_fd=folder)
    os.close(folder)
    assert sight.changed == {str(tmp_path / name) for name in ("one", "two")}
    assert sight.left_files == []


def test_a_link_is_changed_where_it_lies_and_written_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "inside").symlink_to("outside")
    (tmp_path / "file").symlink_to("outside/file")
    with watching() as made:
        os.symlink("/nowhere/at/all", tmp_path / "link")
    with watching() as written:
        (tmp_path / "inside" / "note").write_text("x")
        (tmp_path / "file").write_text("x")
        os.remove(tmp_path / "inside")
    notes = [str(tmp_path / "outside" / name) for name in ("file", "note")]
    assert list(made.changed) == made.left_files == [str(tmp_path / "link")]
    assert written.changed == {*notes, str(tmp_path / "inside")}
    assert written.left_files == notes, "a way that is gone hides what was written"


def test_what_changes_nothing_is_not_heard(tmp_path: Path) -> None:
    with watching() as sight:
        tmp_path.mkdir(exist_ok=True)
        (tmp_path / "never").unlink(missing_ok=True)
        sqlite3.connect(":memory:").close()
        open(os.devnull, "w").close()
        bind(f"\0{tmp_path}"[:100])
        with open(__file__) as own:
            own.read(1)
    assert sight.changed == set()
