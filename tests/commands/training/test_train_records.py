"""A model is served, what it says is recorded and judged, and a recipe trains on that: through the real commands."""

from __future__ import annotations

import asyncio
import string
from pathlib import Path
from typing import Any

import httpx
import pytest

from temper.commands.judging.score_records import ScoreRequest, score_records
from temper.commands.serve import ServeSettings, open_app
from temper.commands.training.preflight import dry_run
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.models.tiny import make_tiny_model
from temper.runs.reader import RunReader

QUESTIONS = [f"{first}x{second}" for first in "bcdf" for second in "ghjk"]
LETTERS = {"min_letters": 2, "max_letters": 2}
VOWELS = """
def score(prompt, response, answer):
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))
"""


async def ask(folder: Path, records: Path, **params: Any) -> None:
    """Every question once, with eight answers."""
    settings = ServeSettings(name="tiny", max_running=64, record=records, dtype="float32", device="cpu")
    app, ending, _ = open_app(folder, settings, key="")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        for question in QUESTIONS:
            body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "n": 8, "max_tokens": 6}
            answer = await client.post("/v1/chat/completions", json={**body, **params})
            assert answer.status_code == 200, answer.text
    await ending.close()


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A recipe that trains on what a new model said to a client, judged by its share of vowels."""
    model = make_tiny_model(
        tmp_path / "model",
        layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=32, seed=0, alphabet=string.ascii_lowercase,
    )  # fmt: skip
    (tmp_path / "vowels.py").write_text(VOWELS)
    reward = f"{tmp_path / 'vowels.py'}:score"
    asyncio.run(ask(model, tmp_path / "records.db", temperature=1.0, top_k=20))
    score_records(tmp_path / "records.db", ScoreRequest(reward=reward))
    return {
        **tiny_recipe,
        "model": {"path": str(model)},
        "train": [{"records": str(tmp_path / "records.db")}],
        "heldout": {
            "generator": "spell_backward",
            "seed": 2,
            "size": 16,
            "options": {"min_letters": 2, "max_letters": 2},
        },
        "reward": [{"kind": reward}],
        "sampling": {"max_new_tokens": 6, "top_k": 20},
        "evaluation": {"samples": 4},
        "rollout": {"groups_per_step": 8},
        "optim": {"learning_rate": 3e-3},
    }


def run_stages(recipe: dict[str, Any], name: str, stages: list[dict[str, Any]], folder: Path) -> RunReader:
    path = folder / f"{name}.toml"
    path.write_text(to_toml(resolve({**recipe, "name": name, "stage": stages}, [], where=name)))
    assert "128 episodes of 16 prompts" in dry_run(path)
    return RunReader(train(path, run=folder / name))


@pytest.mark.heavy
def test_a_policy_learns_from_what_a_client_recorded(recipe: dict[str, Any], tmp_path: Path) -> None:
    with run_stages(recipe, "rl", [{"kind": "rl", "steps": 16}], tmp_path) as run:
        before, after = (result.score for result in run.evaluations() if result.name == "sampled")
        gaps = [point.value for point in run.metric("mismatch/logp_abs_mean")]
        ledger = run.ledger()
    assert after > before + 0.15
    assert gaps[0] == pytest.approx(0, abs=1e-5), "the policy that was served is the one that is trained"
    assert [entry.draw for entry in ledger] == [*range(16 * 8)]
    kept = {"kind": "rejection", "steps": 2, "rollout": {"keep": "best"}}
    read = {"kind": "sft", "steps": 2, "train": [{"path": "stage:rejection"}], "trainer": {"examples_per_step": 16}}
    with run_stages(recipe, "others", [{"kind": "preference", "steps": 4}, kept, read], tmp_path) as run:
        margins = [point.value for point in run.metric("preference/margin")]
        rows = [point.value for point in run.metric("keep/rows")]
        ledger = run.ledger()
    assert margins[0] == 0
    assert (margins[-1] or 0) > 0.05
    assert (rows[-1] or 0) >= 12, "of 16 prompts, those with an answer that was ended and not empty"
    recorded = [(entry.stage, entry.draw) for entry in ledger if entry.stage < 2]
    assert len(set(recorded)) == len(recorded) == (4 + 2) * 8
