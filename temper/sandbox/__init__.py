"""Runs model-written Python behind an OS boundary. The page about it: docs/sandbox.md."""

from temper.sandbox.boundary import require_sandbox
from temper.sandbox.pool import Sandbox
from temper.sandbox.program import Limits, Outcome, Program, SandboxFailed

__all__ = ["Limits", "Outcome", "Program", "Sandbox", "SandboxFailed", "require_sandbox"]
