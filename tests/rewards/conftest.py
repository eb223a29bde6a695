"""What reward tests share: a trajectory that says one thing, and a folder of verifiers that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from temper.types import Completion, Finish, Message, Score, Status, Trajectory, Turn

MISBEHAVING = """
import os, re, time

def reward(prompt, response, answer):
    if response == "raise": raise ValueError("verifier bug")
    if response == "sleep": time.sleep(3600)
    if response == "spin":
        while True: pass
    if response == "bomb": re.fullmatch(r"(a+)+b", "a" * 64)
    if response == "tower": 9 ** 9 ** 9 ** 9
    if response == "crash": os._exit(3)
    if response == "abort": os.abort()
    if response == "exit": raise SystemExit(0)
    if response == "child":
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        open(prompt, "w").write(str(child.pid))
        time.sleep(3600)
    if response == "print": print("noise on stdout"); os.write(1, b"more noise")
    if response == "none": return None
    if response == "text": return "good"
    if response == "nan": return float("nan")
    if response == "modules":
        import sys
        return float("torch" in sys.modules)
    return float(response == answer)

def two_arguments(prompt, response):
    return 1.0
"""


@pytest.fixture
def say() -> Callable[[str], Trajectory]:
    """A finished one-turn trajectory with that text."""

    def make(text: str) -> Trajectory:
        completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[0], finish=Finish.STOP)
        turn = Turn(completion=completion, message=Message(role="assistant", content=text))
        return Trajectory(
            task_id="t:1",
            group_id="g",
            index=0,
            turns=(turn,),
            status=Status.COMPLETED,
            score=Score.unscorable("not scored yet"),
        )

    return make


@pytest.fixture
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module, importable here and in workers, whose `reward` does what the response asks for."""
    name = f"misbehaving_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MISBEHAVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name
