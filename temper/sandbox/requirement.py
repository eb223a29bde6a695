"""Whether this machine can build a sandbox: one is built, once a process, before anything is asked of it.

Owns: the refusal that says what to install or allow. Refuses: any weaker wall; there is no switch.
"""

from __future__ import annotations

import os

from temper.errors import UserError
from temper.sandbox.boundary import INSTALL, Boundary, find_boundary
from temper.sandbox.cell import START_SECONDS, Cell
from temper.sandbox.program import Limits, Program, SandboxFailed


def require_sandbox() -> None:
    """Raises UserError with what to install or allow unless this machine can build a sandbox now."""
    if not _has_built.get(os.getpid()):
        boundary = find_boundary()
        problem = _try(boundary)
        if problem is not None:
            raise UserError(
                f"bubblewrap is installed but cannot build a sandbox here: {problem}. Allow unprivileged user "
                f"namespaces (sysctl user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0; "
                f"in a container: its own seccomp and AppArmor profiles), or reinstall it: {INSTALL}. "
                f"Model-written code is never run unprotected"
            )
        _has_built[os.getpid()] = True


_has_built: dict[int, bool] = {}
"""Process id -> True once a sandbox was built: checking costs a tenth of a second and its answer does not change."""


def _try(boundary: Boundary) -> str | None:
    """Builds one sandbox and runs one program in it. Why that failed, or None."""
    cell = None
    try:
        cell = Cell(boundary, None, file_bytes=1 << 20)
        cell.wait_ready()
        cell.execute(Program("print(6 * 7)"), Limits(wall_seconds=START_SECONDS))
        outcome = cell.conclude()
    except SandboxFailed as error:
        return str(error)
    finally:
        if cell:
            cell.close()
    return None if outcome.stdout == "42\n" else f"a first program ended with {outcome}"
