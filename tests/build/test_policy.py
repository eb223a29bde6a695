"""One way to open a checkpoint, one way to size an engine."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch

from temper.build.policy import Room, describe_policy, open_engine, open_policy, size_engine
from temper.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2] / "temper"
SHAPE = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), alphabet="abc", seed=0, **SHAPE)  # type: ignore[arg-type]


def test_engines_are_sized_in_one_place() -> None:
    """Four places once put the same numbers together, each a little differently. A sampler process is told them."""
    places = [path for path in ROOT.rglob("*.py") if re.search(r" EngineSettings\((?!\*\*)", path.read_text())]
    assert [path.relative_to(ROOT).as_posix() for path in places] == ["build/policy.py"]


def test_checkpoints_are_loaded_to_be_asked_in_one_place() -> None:
    verbs = (*(ROOT / "commands").rglob("*.py"), *(ROOT / "cli").rglob("*.py"))
    assert [path.name for path in verbs if "Renderer(" in path.read_text() or "LocalEngine(" in path.read_text()] == []


def test_an_engine_has_room_for_usual_sequences_and_for_one_of_the_longest(folder: Path) -> None:
    policy = describe_policy(folder)
    for room, tokens in (
        (Room(max_running=4, usual_length=33), 4 * 48),  # whole blocks: each sequence has its own last one
        (Room(max_running=1, usual_length=8), 96),
        (Room(max_running=2, max_length=64), 2 * 64),
    ):
        settings = open_engine(policy, room, device="cpu")._settings
        assert settings.num_blocks * settings.block_size == tokens + (room.max_running + 2) * settings.block_size
        assert settings.max_length == (room.max_length or 96)


def test_a_step_holds_a_token_of_every_running_sequence() -> None:
    assert size_engine(seed=0, max_running=5000, max_length=8, kv_tokens=8).tokens_per_step == 5001


def test_a_policy_answers_every_conversation_as_often_as_it_is_asked(folder: Path) -> None:
    policy = open_policy(folder, Room(max_running=4), dtype="bfloat16")
    assert next(policy.engine._model.parameters()).dtype == torch.bfloat16
    asked = [[{"role": "user", "content": text}] for text in ("ab", "c")]

    async def ask() -> list[list[str]]:
        try:
            return await policy.answer(asked, 3, temperature=1.0, max_new_tokens=4)
        finally:
            await policy.engine.close()

    assert [len(answers) for answers in asyncio.run(ask())] == [3, 3]
