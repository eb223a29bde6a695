"""Which stages an agent may play in, and what a recipe must say of it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from temper.build import agents, check_stages, require_functions
from temper.commands.checkpoints import evaluate_checkpoint
from temper.commands.training.train import train_stages
from temper.config import load_recipe, to_toml
from temper.errors import UserError

ROOT = Path(__file__).parents[2]


def recipe(tmp_path: Path, *overrides: str) -> list[Any]:
    (tmp_path / "mine.py").write_text("def solve(task):\n    return ''\n")
    text = (ROOT / "recipes" / "agent_http.toml").read_text().replace("examples/agents/plain_http.py", "mine.py")
    (tmp_path / "recipe.toml").write_text(text)
    return load_recipe(tmp_path / "recipe.toml", overrides)


def test_a_function_beside_the_recipe_is_found(tmp_path: Path) -> None:
    stages = recipe(tmp_path)
    check_stages(stages)
    assert f"{tmp_path}/mine.py:solve" in to_toml(stages)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.max_turns=1", "rollout.max_turns is the number of calls"),
        ("stage.2.objective.advantage=step_values", "an agent that leads its own cannot be taken back"),
        ("stage.2.objective.advantage={name='returns_to_go',gamma=0.9}", "Use returns_to_go with gamma = 1, not 0.9"),
        ("stage.2.objective={preset='ppo',advantage={name='gae',gamma=0.99}}", "Use gae with gamma = 1, not 0.99"),
        ("stage.2.objective.preset=ppo", "gae with lam = 1, not 0.95; gae_targets with lam = 1, not 0.95; shaping"),
        ("stage.2.objective.preset=vapo", "gae_by_length with alpha = inf, not 0.05"),
        ("stage.2.objective.preset=reinforce_pp", "shaping without kl_in_reward, which returns_to_go would sum"),
        ("env.options.url=http://127.0.0.1:9000", "one of them, not function and url"),
        ("stage.2.kind=rejection", "cannot play in a stage of kind rejection"),
        ("env.options.function=other.py:solve", "other.py is not there"),
        ("rollout.max_episode_cost=1", "max_episode_cost does nothing without env.options.price_per_token"),
        ("env.options.price_per_token=0.1", "price_per_token does nothing without rollout.max_episode_cost"),
        ("env.options.price_per_token=-1", "price_per_token=-1 must be 0"),
        ("env.options.hide=[x]", "Set options.sandbox = true, or leave it out"),
        ("env.options.comand=x", 'option "comand" is unknown'),
    ],
)
def test_what_an_agent_cannot_do_is_said_before_anything_is_read(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_stages(recipe(tmp_path, override))


@pytest.mark.parametrize(
    "advantage",
    ["returns_to_go", "{name='state_returns',gamma=0.9}", "{name='turn_returns',gamma=0.9}"],
)
def test_credit_that_goes_by_time_or_discounts_nothing_is_not_refused(tmp_path: Path, advantage: str) -> None:
    check_stages(recipe(tmp_path, f"stage.2.objective.advantage={advantage}"))


def test_a_discount_is_found_in_every_factor_that_gives_credit(tmp_path: Path) -> None:
    distilled = "stage.2.objective.normalizers=[{name='add_distillation',discount=0.9}]"
    with pytest.raises(UserError, match=r"Use add_distillation with discount = 0, not 0\.9"):
        check_stages(recipe(tmp_path, distilled, "stage.2.model.teacher=teacher"))


def test_a_critic_whose_decay_is_taken_away_goes_with_an_agent(tmp_path: Path) -> None:
    still = "{preset='ppo',shaping=[],advantage={name='gae',lam=1.0},critic={name='gae_targets',lam=1.0}}"
    check_stages(recipe(tmp_path, f"stage.2.objective={still}"))
    endless = "{preset='vapo',advantage={name='gae_by_length',alpha=inf}}"
    check_stages(recipe(tmp_path, f"stage.2.objective={endless}", "stage.2.steps=60"))


def test_a_port_that_is_taken_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    """The recipe imitates first, and its agents would ask after that."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stages = recipe(tmp_path, f"env.options.listen=127.0.0.1:{port}", "heldout.size=2")
        assert [config.stage for config in stages] == ["sft", "rl"]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            train_stages(stages, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [("mine.py:solv", "mine.py:solv cannot be started: AttributeError"), ("no_such_pkg:f", "ModuleNotFoundError")],
)
def test_a_function_that_cannot_be_imported_is_said_before_anything_is_trained(
    tmp_path: Path, function: str, message: str
) -> None:
    stages = recipe(tmp_path, f"env.options.function={function}")
    with pytest.raises(UserError, match=message):
        train_stages(stages, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_functions_are_imported_once_for_a_run_and_in_a_process_that_ends(tmp_path: Path) -> None:
    stages = recipe(tmp_path)
    note = tmp_path / "pids"
    imported = f"import os\nopen({str(note)!r}, 'a').write(f'{{os.getpid()}} ')\n"
    (tmp_path / "mine.py").write_text(imported + "def solve(task): raise SystemExit('not called')")
    assert [config.env.name for config in stages] == ["agent", "agent"]
    asyncio.run(require_functions(stages))
    (process,) = map(int, note.read_text().split())
    assert process != os.getpid()
    assert not Path(f"/proc/{process}").exists()


def test_a_stage_that_plays_nothing_binds_no_port(tmp_path: Path) -> None:
    """So a recipe is looked at, and its environment, beside a run of it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stages = recipe(tmp_path, f"env.options.listen=127.0.0.1:{taken.getsockname()[1]}")
        check_stages(stages)
        data: Any = SimpleNamespace(tokenizer=None, renderer=None, shape=SimpleNamespace(max_context=64))
        player = agents.make_player(stages[-1], data)
        asyncio.run(player.close())


def test_a_command_that_cannot_be_taken_apart_is_said_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"options.command = \"python 'a.py\" .*No closing quotation"):
        check_stages(recipe(tmp_path, "env.options.function=", "env.options.command=python 'a.py"))


def test_a_command_whose_script_is_not_there_is_said_before_anything_is_read(tmp_path: Path) -> None:
    """Where temper was called, and not beside the recipe: there is one of the name."""
    with pytest.raises(UserError, match=r"mine\.py, which options.command names, is not there"):
        check_stages(recipe(tmp_path, "env.options.function=", "env.options.command=python mine.py"))


def test_an_agent_behind_a_wall_does_not_look_into_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither into its own, nor into those beside it, nor into those that name no folder."""
    for name in ("mine", "earlier", "data"):
        (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / "earlier" / "run.db").touch()
    monkeypatch.chdir(tmp_path)
    given: list[Any] = []
    monkeypatch.setattr(agents, "Nursery", lambda settings, closed, heard: given.append(closed))
    data: Any = SimpleNamespace(tokenizer=None, renderer=None, shape=SimpleNamespace(max_context=64))
    agents.make_player(recipe(tmp_path)[-1], data, Path("out/mine"))
    agents.make_player(recipe(tmp_path)[-1], data)
    names = ("runs", "out/mine", "out/earlier")
    assert given == [tuple(str(tmp_path / name) for name in names), (str(tmp_path / "runs"),)]


def test_a_checkpoint_is_not_read_for_agents_that_could_not_ask(tmp_path: Path) -> None:
    recipe(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        overrides = [f"env.options.listen=127.0.0.1:{taken.getsockname()[1]}"]
        with pytest.raises(UserError, match="cannot listen on"):
            evaluate_checkpoint(tmp_path / "no checkpoint", tmp_path / "recipe.toml", overrides=overrides)


def test_what_an_agent_may_draw_is_what_its_episode_may_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(agents, "AgentPlayer", lambda *_, **options: given.append(options["affordable_tokens"]))
    data: Any = SimpleNamespace(tokenizer=None, renderer=None, shape=SimpleNamespace(max_context=64))
    for overrides, tokens in (
        ((), 0),
        (("rollout.max_episode_cost=0.3", "env.options.price_per_token=0.1"), 3),
        (("rollout.max_episode_cost=0.39", "env.options.price_per_token=0.1"), 3),
    ):
        *_, config = recipe(tmp_path, *overrides)
        agents.make_player(config, data)
        assert given.pop() == tokens
    with pytest.raises(UserError, match=r"max_episode_cost=0\.1 is less than one token costs"):
        check_stages(recipe(tmp_path, "rollout.max_episode_cost=0.1", "env.options.price_per_token=0.2"))
