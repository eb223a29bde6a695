"""Runs model-written Python behind an OS boundary. The page about it: docs/sandbox.md."""

from temper.sandbox.pool import Sandbox
from temper.sandbox.program import Command, Limits, Outcome, Program, SandboxFailed
from temper.sandbox.requirement import require_sandbox

__all__ = ["Command", "Limits", "Outcome", "Program", "Sandbox", "SandboxFailed", "require_sandbox"]
