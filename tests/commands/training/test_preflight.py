"""What a dry run finds before a run begins."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.build import Listeners, build_stage, first_model, make_plan, resolve_objective
from temper.commands.training import preflight
from temper.commands.training.preflight import dry_run
from temper.config import load_recipe, resolve, to_toml
from temper.errors import UserError
from temper.folders.integrity import MANIFEST
from temper.planning.gpus import GPUS
from temper.stages.kinds import kind_of
from temper.stages.reading.data import open_data

LEAK = "natalia sold clips to forty eight of her friends in april and then half as many in may how many in all"
OTHER = "a bakery made ninety loaves of bread and sold sixty of them before noon how many loaves are left to sell"


@pytest.fixture
def leaky(tiny_recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """One held-out prompt is in the training file with other words around it, another one word by word."""

    def write(name: str, *prompts: str) -> str:
        rows = [json.dumps({"prompt": prompt, "answer": "a"}) for prompt in prompts]
        (tmp_path / name).write_text("\n".join(rows))
        return str(tmp_path / name)

    tiny_recipe["model"]["new"] |= {"context": 256, "alphabet": "abcdefghijklmnopqrstuvwxyz "}
    tiny_recipe["train"] = [{"path": write("train.jsonl", "nothing like it at all", OTHER, f"please answer {LEAK}")}]
    tiny_recipe["heldout"] = {"path": write("heldout.jsonl", LEAK, OTHER)}
    return tiny_recipe


def write_recipe(recipe: dict[str, Any], folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="tiny")))
    return path


def test_a_dry_run_tells_of_held_out_prompts_in_the_training_data(leaky: dict[str, Any], tmp_path: Path) -> None:
    text = dry_run(write_recipe(leaky, tmp_path))
    assert "contamination: 1 of 2 held-out prompts" in text
    assert "train.jsonl:3 and heldout.jsonl:1" in text
    assert "train.jsonl:2" not in text, "equal prompts are removed, not reported"
    leaky["heldout"] = {"path": leaky["train"][0]["path"], "size": 1}
    assert "contamination" not in dry_run(write_recipe(leaky, tmp_path))


def test_a_dry_run_and_a_run_tell_of_stale_samples_that_nothing_corrects(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["stage"][1]["rollout"]["max_staleness"] = 2
    said = "warning: rollout.max_staleness=2 trains on samples of older weights"
    assert said in dry_run(write_recipe(tiny_recipe, tmp_path))
    warnings: list[str] = []

    async def start() -> None:
        config = resolve(tiny_recipe, [], where="tiny")[1]
        listeners = Listeners(warn=warnings.append)
        stage = build_stage(config, 0, first_model(config, tmp_path), listeners=listeners)
        await make_plan(stage, first_step=1, recorders=(), checkpoint=lambda step: None).parity()
        await stage.close()

    asyncio.run(start())
    assert any(f"warning: {doubt}".startswith(said) for doubt in warnings)
    tiny_recipe["stage"][1]["objective"] = {"corrections": ["token_tis"]}
    assert said not in dry_run(write_recipe(tiny_recipe, tmp_path))


def test_a_run_tells_of_them_before_its_first_step(leaky: dict[str, Any], tmp_path: Path) -> None:
    warnings: list[str] = []

    async def start() -> None:
        config = resolve(leaky, [], where="tiny")[0]
        listeners = Listeners(warn=warnings.append)
        stage = build_stage(config, 0, first_model(config, tmp_path), listeners=listeners)
        await make_plan(stage, first_step=1, recorders=(), checkpoint=lambda step: None).parity()
        await stage.close()

    asyncio.run(start())
    assert len(warnings) == 1
    assert "train.jsonl:3 and heldout.jsonl:1" in warnings[0]


def test_a_dry_run_tries_the_held_out_verifier_too(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    tiny_recipe["evaluation"] = {"reward": [{"kind": "exact"}]}
    path = write_recipe(tiny_recipe, tmp_path)
    assert load_recipe(path)[0].evaluation.reward[0].kind == "exact", "the verifier survives being stored"
    assert "held-out verifier of gold answers   mean 1 of 8 held-out ones" in dry_run(path)


def test_a_dry_run_doubts_a_reward_that_pays_gold_answers_no_more_than_silence(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    assert "in doubt" not in dry_run(write_recipe(tiny_recipe, tmp_path))
    tiny_recipe["reward"] = [{"kind": "tags", "options": {"tags": "answer"}}]
    assert "reward in doubt" in (said := dry_run(write_recipe(tiny_recipe, tmp_path)))
    assert "no gold answer is worth more than saying nothing" in said


def test_verifiers_have_names_that_tell_them_apart(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    names = []
    for judges in ([], [{"kind": "exact"}], [{"kind": "exact", "weight": 2.0}], [{"kind": "edit"}]):
        config = resolve({**tiny_recipe, "evaluation": {"reward": judges}}, [], where="tiny")[1]
        data = open_data(config, resolve_objective(config), kind_of(config).reading, first_model(config, tmp_path))
        assert (data.verifier is data.rubric) == (not judges)
        names.append(data.verifier_name)
    assert len(set(names)) == 3
    assert names[0] == names[3], "the same reward, named or not"


def test_a_verifier_without_held_out_tasks_and_answers_longer_than_the_context_are_refused(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    alone = {key: value for key, value in tiny_recipe.items() if key != "heldout"}
    with pytest.raises(UserError, match=r"evaluation\.reward judges held-out tasks, and there are none"):
        resolve({**alone, "evaluation": {"reward": [{"kind": "exact"}]}}, [], where="tiny")
    tiny_recipe["evaluation"] = {"max_new_tokens": 31}
    with pytest.raises(
        UserError, match=r"with evaluation\.max_new_tokens=31 that is more than the model's context of 32"
    ):
        dry_run(write_recipe(tiny_recipe, tmp_path))


USERS_OWN = """
import os

from temper.protocols import EnvOpening, EnvReply
from temper.types import Task


class BreaksWhenMade:
    def __init__(self) -> None:
        1 / 0


class Whole:
    async def start(self, task: Task, seed: int) -> EnvOpening:
        return EnvOpening(messages=task.messages)

    async def step(self, message) -> EnvReply:
        return EnvReply(is_done=True, reward=float(len(message.content)))

    async def close(self) -> None:
        pass


class BreaksAtStart(Whole):
    async def start(self, task, seed):
        return {}["no such key"]


class StartsWithNothing(Whole):
    async def start(self, task, seed):
        pass


class BreaksAtStep(Whole):
    async def step(self, message):
        raise OSError("the world is flat")


class HasTools(Whole):
    async def start(self, task, seed):
        function = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
        return EnvOpening(messages=task.messages, tools=({"type": "function", "function": function},))


def raises(prompt, response, answer):
    return 1 / 0


def none(prompt, response, answer):
    return None


def several(prompt, response, answer):
    return [1.0]


def not_a_number(prompt, response, answer):
    return float("nan")


def words(prompt, response, answer):
    return "good"


def dies(prompt, response, answer):
    os._exit(3)


def fails_on_nothing(prompt, response, answer):
    return float(response[0] == answer[0])
"""


@pytest.fixture
def users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with environments and rewards that are broken in many ways."""
    name = f"users_own_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(USERS_OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


BROKEN = {
    "BreaksWhenMade": r"ZeroDivisionError: division by zero, in .*users_own.*\.py, line 10",
    "BreaksAtStart": r"KeyError: 'no such key', in .*users_own.*\.py, line 26",
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_environment_that_does_not_start_fails_the_dry_run_with_its_own_line(
    name: str, users_own: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["env"] = {"name": f"{users_own}:{name}"}
    with pytest.raises(UserError, match=BROKEN[name]):
        dry_run(write_recipe(tiny_recipe, tmp_path))


def test_an_environment_that_opens_with_nothing_is_named(
    users_own: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["env"] = {"name": f"{users_own}:StartsWithNothing"}
    with pytest.raises(UserError, match=r"StartsWithNothing\.start returned None, not an EnvOpening"):
        dry_run(write_recipe(tiny_recipe, tmp_path))


def gate_of(recipe: dict[str, Any], folder: Path) -> None:
    """What a run of the recipe's last stage does before anything is trained."""

    async def start() -> None:
        config = resolve(recipe, [], where="tiny")[-1]
        stage = build_stage(config, 0, first_model(config, folder))
        try:
            await make_plan(stage, first_step=1, recorders=(), checkpoint=lambda step: None).parity()
        finally:
            await stage.close()

    asyncio.run(start())


@pytest.mark.parametrize("name", [*BROKEN, "BreaksAtStep"])
def test_a_run_whose_environment_breaks_says_why_before_its_first_step(
    name: str, users_own: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["env"] = {"name": f"{users_own}:{name}"}
    tiny_recipe["sampling"] = {"max_new_tokens": 12}
    wanted = BROKEN.get(name, r"OSError: the world is flat, in .*users_own.*\.py, line 36")
    # A random model seldom ends its turn, and only then is the environment asked.
    tiny_recipe["sampling"]["stop"] = list("abcdefghijklmnopqrstuvwxyz")
    with pytest.raises(UserError, match=rf"none of 8 episodes could be played.*{wanted}"):
        gate_of(tiny_recipe, tmp_path)


def test_tools_that_the_template_leaves_out_fail_the_dry_run_and_the_run(
    users_own: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["env"] = {"name": f"{users_own}:HasTools"}
    with pytest.raises(UserError, match="shows no tools"):
        dry_run(write_recipe(tiny_recipe, tmp_path))
    with pytest.raises(UserError, match="shows no tools"):
        gate_of(tiny_recipe, tmp_path)


def test_tools_of_a_row_are_shown_or_refused_where_no_environment_has_any(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    rows = [{"prompt": "abc"[: 1 + number % 3], "answer": "ab", "tools": [tool]} for number in range(8)]
    (tmp_path / "tools.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny_recipe["stage"] = tiny_recipe["stage"][1:]
    tiny_recipe["train"] = [{"path": str(tmp_path / "tools.jsonl")}]
    with pytest.raises(UserError, match="shows no tools"):
        dry_run(write_recipe(tiny_recipe, tmp_path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "ZeroDivisionError: division by zero"),
        ("none", "the function returned None"),
        ("several", r"the function returned \[1\.0\], not a number or None"),
        ("not_a_number", "the reward is nan"),
        ("words", "the function returned 'good', not a number or None"),
        ("dies", r"worker died \(exit code 3\)"),
    ],
)
def test_a_gold_answer_that_cannot_be_scored_fails_the_dry_run_with_the_rewards_line(
    name: str, reason: str, users_own: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["reward"] = [{"kind": f"{users_own}:{name}"}]
    wanted = rf"24 of 24 gold answers cannot be scored\. Task .*: {reason}, in .*users_own.*\.py, line \d+"
    tiny_recipe["stage"] = tiny_recipe["stage"][1:]
    with pytest.raises(UserError, match=wanted):
        dry_run(write_recipe(tiny_recipe, tmp_path))


def test_a_reward_that_breaks_on_an_empty_answer_fails_the_dry_run(
    users_own: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["reward"] = [{"kind": f"{users_own}:fails_on_nothing"}]
    with pytest.raises(UserError, match=r"fails on 8 of 8 empty answers.*IndexError.*users_own.*\.py, line"):
        dry_run(write_recipe(tiny_recipe, tmp_path))


def test_a_gold_answer_that_is_longer_than_what_may_be_drawn_fails_the_dry_run(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    assert "in all" in dry_run(write_recipe(tiny_recipe, tmp_path))
    tiny_recipe["sampling"] = {"max_new_tokens": 2}  # two letters and the end of the turn are three tokens
    with pytest.raises(UserError, match=r"has 3 tokens with its end, and sampling\.max_new_tokens = 2"):
        dry_run(write_recipe(tiny_recipe, tmp_path))
    tiny_recipe["evaluation"] = {"max_new_tokens": 3}
    del tiny_recipe["stage"][1]
    assert "in all" in dry_run(write_recipe(tiny_recipe, tmp_path)), (
        "only held-out tasks are answered, under their limit"
    )


def test_what_an_environment_pays_for_gold_answers_is_tried_in_the_environment(
    users_own: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["env"], tiny_recipe["reward"] = {"name": f"{users_own}:Whole"}, [{"kind": "env"}]
    text = dry_run(write_recipe(tiny_recipe, tmp_path))
    assert "reward of gold answers   mean 2 of 8" in text
    assert ":Whole: started for 2 tasks" in text


def test_an_answer_that_does_not_fit_beside_the_longest_prompt_is_told_how_long_it_may_be(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 26, "answer": "ab"}))
    tiny_recipe |= {"stage": tiny_recipe["stage"][1:], "train": [{"path": str(tmp_path / "long.jsonl")}]}
    said = r"28 tokens; with sampling\.max_new_tokens=8 .* context of 32\. Use at most sampling\.max_new_tokens=4, "
    with pytest.raises(UserError, match=said):
        dry_run(write_recipe({**tiny_recipe, "sampling": {"max_new_tokens": 8}}, tmp_path))


@pytest.fixture
def long_rows(tiny_recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Two of 400 rows are too long for a context of 32, far behind the tasks that are probed."""
    rows = [{"prompt": "abcdefghijklmnopqrstuvwxyz"[i % 20 :][:3], "answer": "ab"} for i in range(400)]
    rows[389]["prompt"], rows[395]["prompt"] = "a" * 28, "b" * 40
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tiny_recipe["stage"] = tiny_recipe["stage"][1:]
    tiny_recipe["train"] = [{"path": str(tmp_path / "long.jsonl")}]
    return tiny_recipe


def test_every_row_of_a_file_is_measured_before_the_run(long_rows: dict[str, Any], tmp_path: Path) -> None:
    said = (
        r"long\.jsonl: 2 of 400 prompts are too long\. long\.jsonl:396 has 42 tokens; that alone is more than the "
        r"model's context of 32\. Also: long\.jsonl:390\. Use shorter prompts.*train\.skip_bad = true leaves such"
    )
    with pytest.raises(UserError, match=said):
        dry_run(write_recipe(long_rows, tmp_path))
    long_rows["train"][0]["skip_bad"] = True
    assert "2 tasks: long.jsonl:390: 30 tokens, more than 28; long.jsonl:396: 42 tokens" in dry_run(
        write_recipe(long_rows, tmp_path)
    )
    config = resolve(long_rows, [], where="tiny")[0]
    data = open_data(config, resolve_objective(config), kind_of(config).reading, first_model(config, tmp_path))
    drawn = {data.stream.next()[1].id for _ in range(398)}
    assert len(drawn) == 398
    assert not drawn & {"long.jsonl:390", "long.jsonl:396"}
    assert data.longest_prompt == 5


def test_generated_tasks_that_are_too_long_are_named_or_dropped_when_drawn(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["train"][0]["options"] = {"min_letters": 1, "max_letters": 40}
    with pytest.raises(UserError, match=r"generated tasks: \d+ of 264 prompts are too long.*train\.skip_bad"):
        dry_run(write_recipe(tiny_recipe | {"stage": tiny_recipe["stage"][1:]}, tmp_path))


def test_a_dry_run_prints_the_table_of_memory_of_every_stage(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU in MiB of the machine's memory, on a GPU of its own; one that is too small ends it."""
    path = write_recipe(tiny_recipe, tmp_path)
    monkeypatch.setattr(preflight, "pick_device", lambda name: torch.device("cpu"))
    for text in (stages := dry_run(path).split("\n\n")):
        for part in ("weights", "optimiser states", "gradients", "together", "MiB"):
            assert part in text
        assert "GiB on this machine's CPU, most in" in text
        assert "workspaces" not in text, "of CUDA's libraries"
    assert len(stages) == 2
    monkeypatch.setattr(preflight, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(preflight, "this_gpu", lambda: GPUS["h200"])
    on_gpu = dry_run(path).split("\n\n")
    assert len(on_gpu) == 2
    for text in on_gpu:
        assert "of 139.8 GiB, most in" in text
        assert "together" in text
        assert "graphs" in text, "recorded on a GPU alone"
    monkeypatch.setattr(preflight, "this_gpu", lambda: replace(GPUS["h200"], free_bytes=2**20))
    with pytest.raises(UserError, match=r"stage 1 \(sft\): this needs .* GiB, and 0\.0 are free"):
        dry_run(path)


LAYOUTS = {
    "heads of keys over tensor": (
        {}, {"trainers": 2, "parts": True, "tensor": 2},
        "1 heads of keys do not divide over 2 trainers. Use cluster.tensor = 1",
    ),
    "columns over trainers": (
        {"heads": 2, "kv_heads": 2, "mlp_width": 66}, {"trainers": 4, "parts": True, "tensor": 2},
        "66 rows or columns of a layer do not divide over 4 trainers",
    ),
    "heads over context": (
        {"heads": 3, "width": 48}, {"trainers": 2, "context": 2},
        "3 heads of attention, 1 of keys, do not divide over 2 trainers",
    ),
    "context with experts": ({"experts": 4}, {"trainers": 2, "context": 2}, "is a model with experts"),
    "experts over trainers": (
        {"experts": 4}, {"trainers": 3, "parts": True, "experts": True}, "4 experts do not divide over 3 trainers",
    ),
    "experts of a dense model": (
        {}, {"trainers": 2, "parts": True, "experts": True},
        "is a model without experts. Use cluster.experts = false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_cannot_be_shared_out_so_is_refused_before_anything_starts(
    layout: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    new, cluster, message = LAYOUTS[layout]
    tiny_recipe["model"]["new"] |= new
    tiny_recipe |= {"cluster": cluster, "engine": {"place": "process"}}
    with pytest.raises(UserError, match=re.escape(message)):
        dry_run(write_recipe(tiny_recipe, tmp_path))


def test_parts_of_a_family_that_is_not_walked_are_refused_before_anything_starts(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    first = first_model(resolve(tiny_recipe, [], where="tiny")[0], tmp_path)
    config = Gemma2Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(first)
    (first / MANIFEST).unlink(missing_ok=True)
    tiny_recipe["model"] = {"path": str(first)}
    tiny_recipe |= {"cluster": {"trainers": 2, "parts": True}, "engine": {"place": "process"}}
    with pytest.raises(UserError, match=r"cluster.parts is made for the families llama, .* this is a gemma2"):
        dry_run(write_recipe(tiny_recipe, tmp_path))
