from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from temper.envs.adapters import reasoning_gym as adapter
from temper.envs.adapters.reasoning_gym import ReasoningGymReward, final_answer, reasoning_gym, reasoning_gym_mix
from temper.errors import UserError, install_line
from temper.rewards.registry import make_reward
from temper.rewards.workers.pool import WorkerPool
from temper.tasks.generators import make_source
from temper.types import Completion, Finish, Message, Score, Status, Task, Trajectory, Turn

gym = pytest.importorskip("reasoning_gym")
GENERATORS = {"reasoning_gym": reasoning_gym}


def say(text: str) -> Trajectory:
    completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[0], finish=Finish.STOP)
    turn = Turn(completion=completion, message=Message(role="assistant", content=text))
    score = Score.unscorable("not scored yet")
    return Trajectory(task_id="t", group_id="g", index=0, turns=(turn,), status=Status.COMPLETED, score=score)


@pytest.fixture
def reward() -> Iterator[ReasoningGymReward]:
    reward = ReasoningGymReward(WorkerPool, workers=1)
    yield reward
    asyncio.run(reward.close())


def scores(reward: ReasoningGymReward, *pairs: tuple[Task, str]) -> list[Score]:
    async def go() -> list[Score]:
        return [await reward.score(task, say(text)) for task, text in pairs]

    return asyncio.run(go())


def test_items_are_reasoning_gyms_own() -> None:
    task = reasoning_gym(5, 2, family="chain_sum", min_terms=2, max_terms=2)
    entry = gym.create_dataset("chain_sum", seed=2 * 2**24 + 5, size=1, min_terms=2, max_terms=2)[0]
    assert task.messages[0].content == entry["question"]
    assert task.answer == entry["answer"]
    assert task.id == "chain_sum:2:5"


def test_other_seeds_share_items_only_by_chance_although_reasoning_gyms_own_neighbours_share_nearly_all() -> None:
    def questions(seed: int) -> set[str]:
        return {reasoning_gym(i, seed, family="chain_sum").messages[0].content for i in range(500)}

    def raw(seed: int) -> set[str]:
        dataset = gym.create_dataset("chain_sum", seed=seed, size=500)
        return {dataset[i]["question"] for i in range(500)}

    assert len(raw(0) & raw(1)) > 450, "the trap this guards against is gone"
    assert len(questions(0) & questions(1)) <= 5
    assert len(questions(0)) > 490


@pytest.mark.parametrize("family", ["gsm_symbolic", "list_functions"])
def test_families_that_list_their_items_up_front_have_no_last_index(family: str) -> None:
    tasks = [reasoning_gym(i, 0, family=family) for i in (0, 1023, 1024, 5000)]
    assert len({task.messages[0].content for task in tasks}) == 4


def test_the_right_answer_scores_one_and_a_wrong_one_less(reward: ReasoningGymReward) -> None:
    families = [
        "chain_sum",
        "basic_arithmetic",
        "simple_equations",
        "mini_sudoku",
        "countdown",
        "arc_1d",
        "knights_knaves",
    ]
    tasks = [reasoning_gym(7, 3, family=family) for family in families]
    right = scores(reward, *((task, f"Let me think.\n<answer>{task.answer}</answer>") for task in tasks))
    wrong = scores(reward, *((task, "no idea") for task in tasks))
    assert [score.value for score in right] == [1.0] * len(tasks)
    assert all(score.is_value and score.value < 0.5 for score in wrong)  # type: ignore[operator]


def test_an_item_that_cannot_be_made_again_is_an_error(reward: ReasoningGymReward) -> None:
    task = reasoning_gym(7, 3, family="chain_sum")
    other = Task(id=task.id, messages=(Message(role="user", content="something else"),), extra=task.extra)
    (score,) = scores(reward, (other, "5"))
    assert "not the one that was asked" in (score.reason or "")


def test_tasks_from_elsewhere_are_refused_when_data_is_loaded(reward: ReasoningGymReward) -> None:
    assert reward.check(reasoning_gym(0, 0, family="chain_sum")) is None
    assert "generator reasoning_gym" in (reward.check(Task(id="t", messages=())) or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "chain_summ"}, 'family "chain_summ" is unknown. Did you mean "chain_sum"'),
        ({"family": "chain_sum", "min_term": 2}, 'option "min_term" is unknown. Did you mean "min_terms"'),
        ({"family": "chain_sum", "min_terms": 5, "max_terms": 2}, "reasoning-gym refuses family 'chain_sum'"),
        ({}, 'option "family" is missing'),
    ],
)
def test_mistakes_are_named(options: dict[str, str | int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_source("reasoning_gym", options, seed=0, size=0, generators=GENERATORS)  # type: ignore[arg-type]


def test_families_that_depend_on_string_hashes_ask_for_a_fixed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match="PYTHONHASHSEED=0"):
        reasoning_gym(0, 0, family="word_ladder")


def test_negative_seeds_are_refused() -> None:
    with pytest.raises(UserError, match="at least 0"):
        reasoning_gym(0, -1, family="chain_sum")


def test_without_the_package_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=re.escape(install_line("gym"))):
        adapter.reasoning_gym(0, 0, family="chain_sum")


def test_the_reward_registers_with_its_pool_passed_in() -> None:
    rewards = {"reasoning_gym": functools.partial(ReasoningGymReward, WorkerPool)}
    assert make_reward("reasoning_gym", {"strict": True}, rewards).name == "reasoning_gym"
    with pytest.raises(UserError, match='Did you mean "strict"'):
        make_reward("reasoning_gym", {"strictt": True}, rewards)


@pytest.mark.parametrize(
    ("response", "gold", "strict", "answer"),
    [
        (" 42 \n", "42", True, "42"),
        ("so\n 42 \n", "42", True, "so\n 42"),
        ("so\n 42 \n", "42", False, "42"),
        ("<answer>1</answer> no <answer> 2 </answer> end", "2", False, "2"),
        ("1 2\n3 4", "1 2\n3 4", False, "1 2\n3 4"),
        ("a\nb", None, False, "a\nb"),
        ("", "42", False, ""),
    ],
)
def test_final_answer(response: str, gold: str | None, strict: bool, answer: str) -> None:
    assert final_answer(response, gold, strict=strict) == answer


def test_levels_of_a_curriculum_are_harder_and_options_by_name_come_first() -> None:
    easy, hard = (reasoning_gym(3, 0, family="chain_sum", curriculum=level) for level in (0, 9))
    assert json.loads(str(easy.extra["options"])) == {"max_digits": 1, "max_terms": 2, "min_digits": 1, "min_terms": 2}
    assert json.loads(str(hard.extra["options"]))["max_digits"] == 10
    own = reasoning_gym(3, 0, family="chain_sum", curriculum=9, max_digits=2)
    assert json.loads(str(own.extra["options"]))["max_digits"] == 2
    beyond = reasoning_gym(3, 0, family="chain_sum", curriculum=10**6)
    assert json.loads(str(beyond.extra["options"]))["max_terms"] == 12, "a level beyond the last is the last"


def test_every_curriculum_makes_items_at_its_first_level_and_its_verifier_agrees_with_them() -> None:
    from reasoning_gym.factory import CURRICULA

    from temper.envs.adapters.reasoning_gym_items import score

    quick = ["chain_sum", "basic_arithmetic", "mini_sudoku", "maze", "spell_backward", "base_conversion", "gcd"]
    for family in quick:
        assert family in CURRICULA
        task = reasoning_gym(1, 0, family=family, curriculum=1)
        options, question = str(task.extra["options"]), task.messages[0].content
        assert score(family, options, 0, 1, question, task.answer or "") == 1.0, family


def test_items_of_a_level_can_be_scored(reward: ReasoningGymReward) -> None:
    task = reasoning_gym(4, 1, family="chain_sum", curriculum=3)
    right, wrong = scores(reward, (task, task.answer or ""), (task, "no"))
    assert (right.value, wrong.value) == (1.0, 0.0)


def test_a_mixture_draws_by_weight_and_its_level_rises_with_the_index() -> None:
    mix = functools.partial(reasoning_gym_mix, families=["chain_sum", "gcd"], weights=[3.0, 1.0])
    drawn = [str(mix(i, 0).extra["family"]) for i in range(400)]
    assert 250 < drawn.count("chain_sum") < 350
    assert drawn == [str(mix(i, 0).extra["family"]) for i in range(400)], "equal arguments, equal tasks"
    assert drawn != [str(mix(i, 1).extra["family"]) for i in range(400)]

    rising = functools.partial(reasoning_gym_mix, families=["chain_sum"], first_level=1, last_level=3, level_every=10)
    levels = [json.loads(str(rising(i, 0).extra["options"]))["max_digits"] for i in (0, 9, 10, 20, 29, 30, 10**6)]
    assert levels == [2, 2, 3, 4, 4, 4, 4]


def test_a_mixture_holds_families_without_a_curriculum_at_their_defaults() -> None:
    task = reasoning_gym_mix(0, 0, families=["gsm_symbolic"], first_level=2)
    assert task.extra["options"] == "{}"


def test_mixtures_are_equal_in_another_process_whatever_its_hash_seed() -> None:
    program = (
        "from temper.envs.adapters.reasoning_gym import reasoning_gym_mix as mix\n"
        "print([mix(i, 5, families=['chain_sum', 'gcd'], first_level=1, level_every=3).messages[0].content "
        "for i in range(8)])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": []}, "of one length"),
        ({"families": ["gcd"], "weights": [1.0, 2.0]}, "of one length"),
        ({"families": ["gcd", "chain_sum"], "weights": [1.0, 0.0]}, "more than 0"),
        ({"families": ["gcd", "chain_summ"], "weights": [1e9, 1e-9]}, 'Did you mean "chain_sum"'),
        ({"families": ["gcd"], "level_every": 5}, "a schedule needs both"),
    ],
)
def test_mistakes_in_a_mixture_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        reasoning_gym_mix(0, 0, **options)  # type: ignore[arg-type]


def test_mistakes_in_a_level_are_named() -> None:
    with pytest.raises(UserError, match="has no curriculum"):
        reasoning_gym(0, 0, family="gsm_symbolic", curriculum=1)
    with pytest.raises(UserError, match="must be a level from 0"):
        reasoning_gym(0, 0, family="chain_sum", curriculum=-2)
