"""Tasks of broken code: each can be solved, none is solved already, and held-out ones are other mutants."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator

import pytest

from temper.catalogue import GENERATORS
from temper.envs.library import mutants
from temper.envs.library.mutants import read_modules, read_mutants
from temper.envs.library.repair import LEVELS, parity_of, repair, repair_demo
from temper.envs.library.shell import ShellEnv
from temper.errors import UserError
from temper.rewards.code.code import CodeReward
from temper.sandbox import Sandbox, require_sandbox
from temper.types import Message, Task, Trajectory


def missing() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(missing()), reason=missing() or "the sandbox is there")


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    reward = CodeReward(all_or_nothing=False)
    yield reward
    asyncio.run(reward.close())


def score(reward: CodeReward, task: Task, changes: str) -> float:
    episode = dataclasses.replace(Trajectory.saying(task.id, "done"), result=changes)
    found = asyncio.run(reward.score(task, episode))
    assert found.value is not None, found
    return found.value


def test_a_mutation_changes_one_place() -> None:
    made = list(mutants.mutate("def f(a, b):\n    if a < 1:\n        return max(a, b)\n    return a - b"))
    kinds = Counter(kind for kind, _ in made)
    assert kinds == {"operator": 9, "constant": 2, "arguments": 2, "condition": 1, "missing branch": 1}
    texts = {text for _, text in made}
    assert "def f(a, b):\n    if a <= 1:\n        return max(a, b)\n    return a - b" in texts
    assert "def f(a, b):\n    if a < 2:\n        return max(a, b)\n    return a - b" in texts
    assert "def f(a, b):\n    if a < 1:\n        return max(b, a)\n    return a - b" in texts
    assert "def f(a, b):\n    return a - b" in texts
    assert {"def f(n):\n    return range(n - 1)", "def f(n):\n    return range(1, n)"} <= {
        text for _, text in mutants.mutate("def f(n):\n    return range(n)")
    }


def test_functions_of_the_modules_are_apart_and_have_hidden_tests() -> None:
    names = [name for module in read_modules().values() for name in module.functions]
    assert len(set(names)) == len(names), "the judge looks functions up by name, over all modules"
    for module in read_modules().values():
        for name, source in module.functions.items():
            called = {node.func.id for node in ast.walk(ast.parse(source)) if _is_call_of_a_name(node)}
            assert not called & set(names), "a broken one must be told by its own tests"
            assert len(module.tests[name]) > mutants.NUM_VISIBLE


def _is_call_of_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def broken_functions(seed: int, level: int) -> set[str]:
    originals = {source for module in read_modules().values() for source in module.functions.values()}
    found = set()
    for index in range(160):
        for path, text in json.loads(str(repair(index, seed, level=level).extra["files"])).items():
            if not path.startswith("test_"):
                found |= set(text.rstrip("\n").split("\n\n\n")) - originals
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_seeds_of_other_parity_have_other_mutants(level: int) -> None:
    train, held_out = broken_functions(1, level), broken_functions(2, level)
    assert min(len(train), len(held_out)) > 100
    assert not train & held_out
    assert broken_functions(3, level) & train
    assert repair(5, 1, level=level) == repair(5, 1, level=level)
    assert repair(5, 1, level=level) != repair(5, 3, level=level)


def test_level_one_is_one_operator_of_a_short_function() -> None:
    task = repair(0, 1)
    lines = task.messages[0].content.splitlines()
    assert lines[0].startswith("1 def ")
    assert lines[1].startswith("2     return ")
    assert len(lines) == 3
    assert len(json.loads(str(task.extra["files"]))) == 1


def test_bad_options_are_told() -> None:
    with pytest.raises(UserError, match="level=5"):
        repair(0, 1, level=5)
    with pytest.raises(UserError, match='Did you mean "words"'):
        repair(0, 1, modules=["word"])
    with pytest.raises(UserError, match="at least two"):
        repair(0, 1, level=4, modules=["words"])
    with pytest.raises(UserError, match=r"within max_characters=9\. .*allow more"):
        repair(0, 1, max_characters=9)
    assert {"repair", "repair_demo"} <= GENERATORS.keys()


def test_functions_can_be_chosen_by_their_length() -> None:
    def lengths(**options: int) -> list[int]:
        tasks = [make(index, 1, **options) for make in (repair, repair_demo) for index in range(200)]
        return [len(next(iter(json.loads(str(task.extra["files"])).values())).rstrip()) for task in tasks]

    assert max(lengths(max_characters=40)) == 40
    assert max(lengths()) > 60


@pytest.mark.parametrize("index", range(20))
def test_a_demonstration_is_an_episode_that_mends_the_code(index: int) -> None:
    task = repair_demo(index, 1)
    says_word = index % 4 == 3
    call = task.messages[-2].content if says_word else str(task.answer)

    async def play() -> str | None:
        env = ShellEnv(tools=["line"], call_format="plain", show_tools="no")
        await env.start(task, 0)
        reply = await env.step(Message(role="assistant", content=call))
        assert not says_word or (task.messages[-1], task.answer) == (reply.messages[0], "done")
        return (await env.step(Message(role="assistant", content="done"))).result

    assert json.loads(str(asyncio.run(play()))) == json.loads(str(task.extra["solution"]))


@needs_sandbox
def test_the_solution_scores_and_the_task_as_it_is_does_not(reward: CodeReward) -> None:
    task = repair(0, 2, level=2)
    assert reward.check(task) is None
    assert score(reward, task, str(task.extra["solution"])) == 1.0
    assert score(reward, task, "{}") == 0.0


@needs_sandbox
@pytest.mark.heavy
def test_one_of_two_places_is_a_share(reward: CodeReward) -> None:
    task = repair(0, 2, level=4)
    (first, text), _ = json.loads(str(task.extra["solution"])).items()
    assert 0.0 < score(reward, task, json.dumps({first: text})) < 1.0


@needs_sandbox
@pytest.mark.heavy
@pytest.mark.parametrize("level", LEVELS)
def test_tasks_can_be_solved_and_are_not_solved_already(level: int, reward: CodeReward) -> None:
    for index in range(6):
        task = repair(index, 2 + index % 2, level=level)
        assert score(reward, task, str(task.extra["solution"])) == 1.0, task
        assert score(reward, task, "{}") == 0.0, task


@needs_sandbox
@pytest.mark.heavy
def test_the_table_of_mutants_is_what_the_rule_makes_and_the_tests_tell_apart() -> None:
    pool = Sandbox(size=2)
    try:
        assert tuple(mutants.prove(pool)) == read_mutants()
    finally:
        pool.close()
    assert {parity_of(mutant) for mutant in read_mutants()} == {0, 1}
