"""Runs model-written Python behind an OS boundary. The page about it: docs/sandbox.md."""

from temper.sandbox.pool import Sandbox
from temper.sandbox.program import Limits, Outcome, Program, SandboxFailed
from temper.sandbox.requirement import require_sandbox

__all__ = ["Limits", "Outcome", "Program", "Sandbox", "SandboxFailed", "require_sandbox"]
