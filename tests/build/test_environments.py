"""What a recipe says of where environments live, and that it is so."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from temper.build import check_stages
from temper.build.agents import check_judge
from temper.build.environments import Environments
from temper.commands.training.preflight import dry_run
from temper.commands.training.train import train
from temper.commands.training.trials import try_environment
from temper.config import resolve, to_toml
from temper.config.sections import EnvConfig
from temper.envs.library.shop import shop
from temper.envs.threads import play_script
from temper.envs.tool_calls import write_call
from temper.errors import UserError
from temper.models.tiny import character_tokenizer
from temper.plugins import name_function
from temper.runs.reader import RunReader
from temper.tasks.render import Renderer
from temper.types import EventKind, Task

ENV = """
import os
from contextlib import nullcontext
from pathlib import Path
from temper import EnvOpening, EnvReply, Message

class Twice:
    async def start(self, task, seed):
        with (Path(__file__).parent / "pids").open("a") as file:
            file.write(f"{os.getpid()}\\n")
        self.turns, self.answer = 0, task.answer
        return EnvOpening(messages=task.messages)

    async def step(self, message):
        self.turns += 1
        paid = float(message.content[:1] == self.answer[:1])
        return EnvReply(messages=(Message(role="user", content="ab"),), is_done=self.turns == 2, reward=paid)

    async def close(self): ...
"""


def recipe_of(tiny_recipe: dict[str, Any], folder: Path, **env: Any) -> Path:
    """RL in that environment."""
    (folder / "world.py").write_text(ENV)
    stage = {**tiny_recipe["stage"][-1], "steps": 2, "rollout": {"groups_per_step": 4, "group_size": 4, "max_turns": 2}}
    env["name"] = f"{folder / 'world.py'}:Twice"
    path = folder / "recipe.toml"
    table = {**tiny_recipe, "reward": [{"kind": "env"}], "env": env, "stage": [stage]}
    path.write_text(to_toml(resolve(table, [], where="tiny")))
    return path


@pytest.mark.heavy
def test_a_run_with_workers_ends_with_the_weights_of_one_without(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    weights = {}
    for place in ("here", "process"):
        folder = tmp_path / place
        folder.mkdir()
        path = recipe_of(tiny_recipe, folder, place=place)
        assert "Twice: started for" in dry_run(path)
        run = train(path, run=folder / "run")
        weights[place] = [file.read_bytes() for file in sorted((run / "checkpoints").rglob("*.safetensors"))]
        pids = {int(line) for line in (folder / "pids").read_text().split()}
        assert (os.getpid() in pids) == (place == "here")
        assert all(pid == os.getpid() or not Path(f"/proc/{pid}").exists() for pid in pids)
    assert weights["here"] == weights["process"] != []


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"workers": 3}, 'workers is of environments in processes: set place = "process"'),
        ({"call_seconds": 3}, "call_seconds is of environments in processes"),
        ({"place": "process", "workers": 0}, "workers"),
        ({"place": "elsewhere"}, "place"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(
    tiny_recipe: dict[str, Any], tmp_path: Path, env: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of(tiny_recipe, tmp_path, **env)


def test_an_agent_and_a_closure_have_no_place_in_workers(tiny_recipe: dict[str, Any]) -> None:
    def closure() -> object:
        return object()

    wanted = ((name_function(closure), "closure was handed over in Python"), ("agent", "processes of its own"))
    for name, message in wanted:
        config = EnvConfig(name=name, place="process")
        with pytest.raises(UserError, match=rf'env\.place = "process": .*{message}'):
            Environments(config)
    tiny_recipe["env"] = {"name": wanted[0][0], "place": "process"}
    with pytest.raises(UserError, match="closure was handed over"):
        check_stages(resolve(tiny_recipe, [], where="tiny"))


COSTLY = """
from temper.envs.tool_env import Presentation, ToolEnv
from temper.envs.tools import tool
from temper.types import Message

@tool(cost=COST)
def ask() -> str:
    return "a"

class Asks(ToolEnv):
    def __init__(self):
        super().__init__([ask], presentation=Presentation(call_format="plain", show_tools="no", mark_untrusted=False))

    async def step(self, message):
        return await super().step(Message(role="assistant", content="ask()"))
"""


@pytest.mark.parametrize("place", ["here", "process"])
def test_a_recipe_bounds_what_its_episodes_cost(tmp_path: Path, tiny_recipe: dict[str, Any], place: str) -> None:
    """Whatever the policy says, this environment asks until there is no money left."""
    (tmp_path / "costly.py").write_text(COSTLY.replace("COST", "0.5"))
    env = {"name": f"{tmp_path / 'costly.py'}:Asks", "place": place}
    stage = {**tiny_recipe["stage"][-1], "steps": 1, "sampling": {"stop": list("abcdefghijklmnopqrstuvwxyz")}}
    stage["rollout"] = {"groups_per_step": 2, "group_size": 2, "max_turns": 9, "max_episode_cost": 1.0}
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(resolve({**tiny_recipe, "env": env, "stage": [stage]}, [], where="tiny")))
    with RunReader(train(path, run=tmp_path / "run")) as reader:
        played = reader.trajectories(0, 1)
    assert {one.status for one in played} <= {"truncated_turns", "truncated_length"}
    whole = [one for one in played if one.status == "truncated_turns"]
    assert whole
    assert {sum(event["cost"] for event in one.events) for one in whole} == {1.0}


PAYS = """
from temper.envs.tool_env import Presentation, ToolEnv
from temper.envs.tools import tool
from temper.types import Message

@tool(effect="irreversible")
def pay() -> str:
    return "a"

class Pays(ToolEnv):
    def __init__(self):
        super().__init__([pay], presentation=Presentation(call_format="plain", show_tools="no", mark_untrusted=False))

    async def step(self, message):
        return await super().step(Message(role="assistant", content="pay()"))
"""


@pytest.mark.parametrize(("allowed", "kind"), [(["pay"], EventKind.SIDE_EFFECT), ([], EventKind.DESCRIBED)])
def test_what_evaluations_did_to_the_world_is_in_the_store(
    tmp_path: Path, tiny_recipe: dict[str, Any], allowed: list[str], kind: EventKind
) -> None:
    """Whatever the policy says, this environment pays in each turn."""
    (tmp_path / "paying.py").write_text(PAYS)
    env = {"name": f"{tmp_path / 'paying.py'}:Pays", "allow": allowed}
    stage = {**tiny_recipe["stage"][-1], "steps": 1, "sampling": {"stop": list("abcdefghijklmnopqrstuvwxyz")}}
    stage["rollout"] = {"groups_per_step": 2, "group_size": 2, "max_turns": 2}
    path, letters = tmp_path / "recipe.toml", "model.new.alphabet=abcdefghijklmnopqrstuvwxyz ():,"
    path.write_text(to_toml(resolve({**tiny_recipe, "env": env, "stage": [stage]}, [letters], where="tiny")))
    with RunReader(train(path, run=tmp_path / "run")) as reader:
        found, results = reader.heldout_effects(), reader.evaluations()
    assert {(one.step, one.evaluation) for one in found} == {(result.step, result.name) for result in results}
    assert {(one.kind, one.name) for one in found} == {(kind, "pay")}
    assert {one.turn for one in found} <= {0, 1}
    assert len({one.task_id for one in found}) == 8, "all that are held out"


def test_a_bound_of_cost_is_refused_where_nothing_costs(tmp_path: Path, tiny_recipe: dict[str, Any]) -> None:
    rollout = {"max_episode_cost": 1.0}
    for env, message in (
        ({}, 'nothing in env "single_turn" has a cost'),
        ({"name": "calculator"}, 'nothing in env "calculator" has a cost'),
        ({"name": f"{tmp_path / 'world.py'}:Twice"}, "nothing in Twice has a cost"),
    ):
        (tmp_path / "world.py").write_text(ENV)
        stage = {**tiny_recipe["stage"][-1], "rollout": rollout}
        with pytest.raises(UserError, match=message):
            check_stages(resolve({**tiny_recipe, "env": env, "stage": [stage]}, [], where="tiny"))
    (tmp_path / "costly.py").write_text(COSTLY.replace("COST", "0.0"))
    path = tmp_path / "recipe.toml"
    env = {"name": f"{tmp_path / 'costly.py'}:Asks"}
    path.write_text(to_toml(resolve({**tiny_recipe, "env": env, "stage": [stage]}, [], where="tiny")))
    with pytest.raises(UserError, match="no tool of Asks has a cost"):
        dry_run(path)


def test_a_wrong_option_is_said_here_before_a_worker_is_started() -> None:
    with pytest.raises(UserError, match='option "largest" is unknown'):
        Environments(EnvConfig(name="calculator", options={"largest": 3}, place="process"))("single_turn")


def test_what_the_run_answers_is_not_asked_from_a_worker(tiny_recipe: dict[str, Any]) -> None:
    """With an address it may: whoever plays can reach that."""
    for judge, is_refused in (("policy", True), ("http://127.0.0.1:9/v1", False)):
        env = {"place": "process", "options": {"judge": judge}}
        (config,) = resolve({**tiny_recipe, "env": env, "stage": tiny_recipe["stage"][1:]}, (), where="test")
        with pytest.raises(UserError, match=r"Give env.options.judge an address") if is_refused else nullcontext():
            check_judge(config)


@pytest.mark.parametrize("place", ["here", pytest.param("process", marks=pytest.mark.heavy)])
@pytest.mark.parametrize("names", [[], ["pay"]])
def test_what_cannot_be_undone_is_done_where_the_recipe_names_it(place: str, names: list[str]) -> None:
    task = shop(0, 0)
    config = EnvConfig(name="shop", place=place, allow=names)  # type: ignore[arg-type]
    calls = [write_call("hermes", call, arguments) for call, arguments in json.loads(str(task.extra["solution"]))]

    async def visit() -> tuple[float | None, bool]:
        environments = Environments(config)
        replies = await play_script(environments("shop"), task, (*calls, "done"))
        await environments.close()
        events = [event.kind for reply in replies for event in reply.events]
        return replies[-1].reward, EventKind.DESCRIBED in events

    assert asyncio.run(visit()) == ((1.0, False) if names else (0.0, True))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"name": "shop", "allow": ["pey"]}, r'names "pey".*It has pay'),
        ({"name": "calculator", "allow": ["pay"]}, "It has none"),
        ({"name": "single_turn", "allow": ["pay"]}, "no tools"),
    ],
)
def test_a_name_that_no_such_tool_has_is_refused(env: dict[str, Any], words: str) -> None:
    async def start() -> None:
        await Environments(EnvConfig(**env))(env["name"]).start(shop(0, 0), 0)

    with pytest.raises(UserError, match=words):
        asyncio.run(start())


def test_tasks_that_name_their_own_environments_need_not_all_have_the_tool() -> None:
    async def start(name: str, task: Task) -> None:
        await Environments(EnvConfig(allow=["pay"]))(name).start(task, 0)

    for name in ("shop", "calculator", "single_turn"):
        asyncio.run(start(name, shop(0, 0)))


def test_a_dry_run_says_what_would_only_be_described(tiny_recipe: dict[str, Any]) -> None:
    renderer = Renderer(character_tokenizer("".join(map(chr, range(32, 127)))))
    data: Any = SimpleNamespace(renderer=renderer, asked=[shop(0, 0)], shape=SimpleNamespace(max_context=4096))
    for names in ([], ["pay"]):
        env = {"name": "shop", "options": {"call_format": "plain", "show_tools": "no"}, "allow": names}
        (config,) = resolve({**tiny_recipe, "env": env, "stage": tiny_recipe["stage"][1:]}, [], where="tiny")
        said = asyncio.run(try_environment(config, data))["environment"]
        assert said.endswith("only described, and not carried out, since env.allow does not name it: pay") == (
            not names
        )
