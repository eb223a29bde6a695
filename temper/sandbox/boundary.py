"""The wall: the bubblewrap command line, and the refusal where it cannot be built.

Owns: what a sandbox can see of the host, and the check that this machine can build one at all.
Refuses: any weaker wall. There is no switch that runs a program without it.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from temper.errors import UserError
from temper.sandbox import guest
from temper.sandbox.filter import ARCHITECTURES

INSTALL = "apt-get install bubblewrap"
NOBODY = "65534"
MOVED = "/mnt"
SYSTEM_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
DEVICES = ("null", "zero", "random", "urandom")
PROGRAMS = ("/bin", "/usr/bin", "/etc/alternatives")
"""What a shell is of use with. Set-user-id programs are among them, and get no rights: see no new privileges."""
OWN_PROGRAMS = "/opt/bin"
"""Where `python` is the interpreter that the sandbox shows."""
ENVIRONMENT = {"PATH": f"{OWN_PROGRAMS}:/usr/bin:/bin", "HOME": guest.FOLDER, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Boundary:
    """What does not change from one sandbox to the next on this machine."""

    bwrap: str
    python: str
    """The interpreter outside any virtual environment, at the path it has on the host."""
    exposed: tuple[tuple[str, str], ...]
    """The interpreter's own files, where they are not among the system's libraries: (where they are, where shown)."""
    hidden: tuple[str, ...]
    """Folders within those that hold installed packages."""
    drop_root: tuple[str, ...]
    """Command that gives up root first: root on the host would own what the wall shows, and has no process limit."""
    has_shell: bool = False
    """Whether the programs of the system are there, a shell among them."""

    def command(self, *, seccomp: int, info: int, control: int, file_bytes: int) -> list[str]:
        """The whole command line. The numbers are descriptors that the child inherits."""
        return [
            *self.drop_root,
            self.bwrap,
            *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "box"),
            *("--cap-drop", "ALL", "--new-session", "--die-with-parent", "--as-pid-1"),
            *("--seccomp", str(seccomp), "--info-fd", str(info)),
            *self._system(),
            *(self._programs() if self.has_shell else ()),
            *("--size", str(file_bytes), "--tmpfs", "/tmp", "--dir", guest.FOLDER),
            *("--size", str(file_bytes), "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/", "--chdir", guest.FOLDER, "--clearenv"),
            *(part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)),
            *(("--setenv", "PYTHONDONTWRITEBYTECODE", "1") if self.has_shell else ()),  # no caches among kept files
            *("--", self.python, "-I", "-S", "-B", "-X", "utf8", "-c", _guest_text(), str(control)),
        ]

    def _system(self) -> list[str]:
        arguments = show_folders(SYSTEM_LIBRARIES)
        arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc"]
        for source, place in self.exposed:
            arguments += ["--ro-bind", source, place]
        for folder in self.hidden:
            arguments += ["--tmpfs", folder, "--remount-ro", folder]
        for device in DEVICES:
            arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        for name, number in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
            arguments += ["--symlink", f"/proc/self/fd{number}", f"/dev/{name}"]
        return arguments

    def _programs(self) -> list[str]:
        arguments = show_folders(PROGRAMS)
        for name in ("python", "python3"):
            arguments += ["--symlink", self.python, f"{OWN_PROGRAMS}/{name}"]
        return arguments


def show_folders(folders: tuple[str, ...]) -> list[str]:
    """The folders that there are, read-only."""
    arguments: list[str] = []
    for folder in folders:
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    return arguments


@functools.cache
def _guest_text() -> str:
    return Path(guest.__file__).read_text()


def find_boundary(*, has_shell: bool = False) -> Boundary:
    """Looks at this machine; raises UserError where a part is missing. Builds nothing."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        raise UserError(
            f"the sandbox needs Linux on {' or '.join(ARCHITECTURES)}, this is {sys.platform} on {platform.machine()}. "
            f"Run programs on such a machine; they are never run unprotected"
        )
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError(
            f"bubblewrap (bwrap) is not installed, and model-written code runs only behind it. Install it: {INSTALL}"
        )
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(sys.base_prefix)
    python = prefix / "bin" / name if (prefix / "bin" / name).exists() else Path(sys.executable).resolve()
    exposed, hidden = [python], []
    if prefix != Path("/usr"):  # otherwise its libraries are the system's
        libraries = [prefix / part for part in ("lib", "lib64")]
        exposed += [folder for folder in libraries if folder.is_dir() and not folder.is_symlink()]
        hidden = [folder / name / "site-packages" for folder in exposed[1:]]
    is_moved = os.geteuid() == 0 and not _is_open_to_all(prefix)
    return Boundary(
        bwrap,
        str(python),
        tuple((str(path).replace(str(prefix), MOVED, 1) if is_moved else str(path), str(path)) for path in exposed),
        tuple(str(folder) for folder in hidden if folder.is_dir()),
        _drop_root(str(prefix) if is_moved else None) if os.geteuid() == 0 else (),
        has_shell,
    )


def _drop_root(moved: str | None) -> tuple[str, ...]:
    """`moved`: a folder only root can walk to (in its home); root mounts it where nobody can, for the child alone."""
    tools = {name: shutil.which(name) for name in ("setpriv", "unshare", "mount", "sh")}
    for name, path in tools.items():
        if path is None:
            raise UserError(f"{name}, needed to give up root, is not installed. Install it: apt-get install util-linux")
    setpriv = (str(tools["setpriv"]), "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups")
    if moved is None:
        return setpriv
    script = f'{tools["mount"]} --bind "$0" {MOVED} && exec "$@"'
    return (str(tools["unshare"]), "--mount", "--", str(tools["sh"]), "-c", script, moved, *setpriv)


def _is_open_to_all(folder: Path) -> bool:
    return all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents))
