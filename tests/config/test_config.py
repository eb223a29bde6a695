"""A recipe says what it means, every key is read, and a typo is never ignored."""

from __future__ import annotations

import asyncio
import copy
import random
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training.train import RunRecords, run_stages
from temper.config import (
    RewardConfig,
    RunConfig,
    Section,
    load_recipe,
    parse_override,
    part_names,
    resolve,
    section_of,
    to_toml,
)
from temper.errors import UserError
from temper.runs.display import Display
from temper.runs.store.run_store import open_run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def resolve_one(table: dict[str, Any], *overrides: str) -> list[RunConfig]:
    return resolve(table, overrides, where="recipe.toml")


def key_paths(section: type[Section], prefix: str = "") -> list[str]:
    paths = []
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        paths += key_paths(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]  # type: ignore[arg-type]
    return paths


def test_a_stage_overrides_the_shared_keys_and_nothing_else(tiny_recipe: dict[str, Any]) -> None:
    supervised, rl = resolve_one(tiny_recipe)
    assert (supervised.stage, supervised.steps, supervised.optim.learning_rate) == ("sft", 6, 3e-3)
    assert (rl.stage, rl.steps, rl.rollout.group_size) == ("rl", 8, 4)
    assert supervised.sampling == rl.sampling


def test_overrides_reach_every_stage_and_are_read_as_toml(tiny_recipe: dict[str, Any]) -> None:
    stages = resolve_one(tiny_recipe, "seed=3", "optim.schedule=cosine", "sampling.temperature=0.5")
    assert {(s.seed, s.optim.schedule, s.sampling.temperature) for s in stages} == {(3, "cosine", 0.5)}
    assert parse_override("a.b=[1, 2]") == {"a": {"b": [1, 2]}}
    with pytest.raises(UserError, match="key=value"):
        parse_override("optim.learning_rate")


def test_the_resolved_recipe_reads_back_to_itself(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    tiny_recipe["prompt"] = {"template": 'quote " backslash \\ newline \n {prompt}'}
    tiny_recipe["stage"][1]["objective"] = {"gate": {"name": "clip", "high": 0.28}, "regularizers": []}
    stages = resolve_one(tiny_recipe)
    (tmp_path / "config.toml").write_text(to_toml(stages))
    assert load_recipe(tmp_path / "config.toml") == stages


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert load_recipe(path)


@pytest.mark.parametrize("key", key_paths(RunConfig))
def test_a_misspelt_key_is_an_error_that_names_the_right_one(key: str, tiny_recipe: dict[str, Any]) -> None:
    random_ = random.Random(key)
    *parents, name = key.split(".")
    typo = name
    while typo == name:
        place = random_.randrange(len(name))
        typo = name[:place] + random_.choice(string.ascii_lowercase) + name[place + 1 :]
    table: dict[str, Any] = {typo: 1}
    for depth, parent in reversed(list(enumerate(parents))):
        # A list of tables inside a table; one at the top is in the recipe already.
        table = {parent: [table] if depth and parent == "reward" else table}
    merged = copy.deepcopy(tiny_recipe)
    merged.pop("stage")
    for parent, value in table.items():
        if isinstance(merged.get(parent), list):
            merged[parent][0] = {**merged[parent][0], **value}
        elif isinstance(merged.get(parent), dict):
            merged[parent] = _merged(merged[parent], value)
        else:
            merged[parent] = value
    with pytest.raises(UserError, match=f'"(.*\\.)?{typo}" is unknown') as error:
        resolve_one(merged)
    assert "Allowed here" in str(error.value)


def _merged(below: dict[str, Any], above: Any) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        out[key] = _merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def test_the_message_names_file_line_and_nearest_key(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('name = "x"\n[model]\npath = "m"\n[optim]\nlearnin_rate = 1\n[[train]]\npath = "t.jsonl"\n')
    with pytest.raises(UserError, match=r'recipe.toml, line 5: key "optim.learnin_rate" .* "learning_rate"'):
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": []}, r"add a \[\[train\]\] table"),
        ({"model": {}}, "exactly one of model.path"),
        ({"model": {"path": "x", "new": {}}}, "exactly one of model.path"),
        ({"train": [{"path": "a", "generator": "b"}]}, "exactly one of path, generator and records"),
        ({"heldout": {"generator": "spell_backward"}}, "heldout.size is missing"),
        ({"prompt": {"template": "no slot"}}, "lacks the slot"),
        ({"optim": {"warmup_steps": 200}}, "more than steps"),
        ({"steps": 0}, "greater than or equal to 1"),
        ({"sampling": {"temperature": 0}}, "greater than 0"),
        ({"model": {"new": {"width": 30, "heads": 4}}}, "multiple of heads"),
        (
            {"model": {"path": "x", "teacher": "a", "teachers": {"math": "b"}}},
            "one of model.teacher and model.teachers",
        ),
        ({"engine": {"kind": "sglang"}}, "needs its address"),
        ({"engine": {"address": "http://here:1"}}, "no other has one"),
        ({"engine": {"kind": "sglang", "address": "here:1"}}, '"here:1" must begin with http'),
        ({"engine": {"kind": "sglang", "address": ["http://here:1", "here:2"]}}, '"here:2" must begin with http'),
        ({"engine": {"kind": "sglang", "address": "http://"}}, "and name a host"),
        ({"engine": {"kind": "sglang", "address": []}}, "or a list of addresses"),
        ({"engine": {"kind": "sglang", "address": 30000}}, "or a list of addresses"),
        ({"engine": {"kind": "sglang", "address": [""]}}, '"" must begin with http'),
        ({"engine": {"address": ["http://here:1"]}}, "no other has one"),
        (
            {"engine": {"kind": "sglang", "address": ["http://here:1", "http://here:1/"]}},
            '"http://here:1" stands here twice',
        ),
        (
            {"engine": {"kind": "sglang", "address": "http://here:1"}, "cluster": {"samplers": 2}},
            "cluster.samplers is about sampler processes: give engine.address a list of servers",
        ),
        ({"cluster": {"silent_seconds": 5.0}}, "cluster.silent_seconds is about sampler processes: set engine.place"),
    ],
)
def test_each_contradiction_has_its_message(change: dict[str, Any], message: str, tiny_recipe: dict[str, Any]) -> None:
    tiny_recipe.pop("stage")
    with pytest.raises(UserError, match=message):
        resolve_one({**tiny_recipe, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": {"lesson": {"beta": 0.1}}}, '"objective.lesson" is called objective.loss now'),
        ({"optim": {"adam": [0.9, 0.95, 1e-8]}}, "optim.beta1, optim.beta2 and optim.epsilon"),
        ({"engine": {"kind": "sglang+http://here:1"}}, r'\{kind = "sglang", address = "http://here:1"\}'),
        ({"engine": {"steps_per_sync": 0}}, "engine.graphs = false"),
        ({"engine": {"cuda_graphs": False}}, "is called engine.graphs now"),
        ({"model": {"path": "x", "teacher": "math=a, code=b"}}, r"model.teachers = \{math ="),
        ({"model": {"path": "x", "lora": {"dropout": 0.1}}}, "another policy than the trainer's"),
    ],
)
def test_an_old_spelling_is_an_error_that_names_the_new_one(
    change: dict[str, Any], message: str, tiny_recipe: dict[str, Any]
) -> None:
    tiny_recipe.pop("stage")
    with pytest.raises(UserError, match=message):
        resolve_one({**tiny_recipe, **change})


def test_a_teacher_whose_directory_has_an_equals_sign_is_one_teacher(tiny_recipe: dict[str, Any]) -> None:
    tiny_recipe["model"] = {"path": "x", "teacher": "runs/lr=1"}
    assert resolve_one(tiny_recipe)[0].model.taught_by == {"": "runs/lr=1"}
    tiny_recipe["model"] = {"path": "x", "teachers": {"math": "a", "code": "b"}}
    assert resolve_one(tiny_recipe)[0].model.taught_by == {"math": "a", "code": "b"}


def test_files_that_are_not_recipes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = [")
    with pytest.raises(UserError, match="not valid TOML"):
        load_recipe(tmp_path / "bad.toml")


READ_ELSEWHERE = {
    # Read only where the case arises, each by a test of its own.
    "RunConfig.name",  # the run directory's name: commands/training/train.py
    "ModelConfig.path",  # instead of model.new
    "ModelConfig.teacher", "ModelConfig.teachers", "ModelConfig.offload",  # by objectives with another model
    # Where there is an adapter.
    "LoraConfig.rank", "LoraConfig.alpha", "LoraConfig.targets", "LoraConfig.rslora", "LoraConfig.base",
    "RoutersConfig.balance", "RoutersConfig.z", "RoutersConfig.bias", "RoutersConfig.frozen",  # where there are experts
    "EngineConfig.address", "EngineConfig.key_variable", "EngineConfig.tensor_parallel",  # by SGLang, by vLLM
    # Before the first stage: commands/training/ranks.py.
    "ClusterConfig.place", "ClusterConfig.address", "ClusterConfig.trainers", "ClusterConfig.rank_seconds",
    "EnvConfig.workers", "EnvConfig.call_seconds",  # by worker processes
    # By sampler processes.
    "EngineConfig.threads", "ClusterConfig.samplers", "ClusterConfig.max_restarts", "ClusterConfig.silent_seconds",
    "ClusterConfig.parts",  # by the planner
    "RolloutConfig.keep",  # by rejection sampling
    "ThinkingConfig.budget", "ThinkingConfig.closing", "ThinkingConfig.end",  # where there is a budget for thinking
    "RolloutConfig.transcripts_gb",  # before the first stage: commands/training/train.py
    "StageSource.skip_bad",  # by files
    "RunConfig.mirrors",  # before the first stage: commands/training/train.py
    "StageSource.path", "StageSource.prompt_field", "StageSource.answer_field", "StageSource.answer_pattern",
}  # fmt: skip


def test_every_key_is_read_by_a_run(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = resolve_one(tiny_recipe, "checkpoint.every=100")
    read: set[str] = set()
    plain = Section.__getattribute__

    def tracking(self: Section, name: str) -> Any:
        if name in type(self).model_fields:
            read.add(f"{type(self).__name__}.{name}")
        if name == "model_dump":  # whoever dumps a section hands every key of it on
            read.update(f"{type(self).__name__}.{field}" for field in type(self).model_fields)
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", tracking)
    store = open_run(tmp_path / "run", config="", resume=False)
    try:
        asyncio.run(run_stages(stages, tmp_path / "run", RunRecords(store, Display())))
    finally:
        store.close()
    monkeypatch.undo()
    every = {f"{s.__name__}.{f}" for s in _sections(RunConfig) for f in s.model_fields}
    assert every - read - READ_ELSEWHERE == set(), "a key that nothing reads is a promise that nobody keeps"


def _sections(section: type[Any]) -> list[type[Any]]:
    inner = [section_of(field.annotation) for field in section.model_fields.values()]
    return [section, *(deeper for part in inner if part for deeper in _sections(part))]


def test_toml_of_the_demo_is_what_the_reader_expects() -> None:
    demo = tomllib.loads((RECIPES[0].parent / "demo.toml").read_text())
    assert [stage["kind"] for stage in demo["stage"]] == ["sft", "rl"]


def test_files_beside_the_recipe_are_found_first_and_others_where_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "recipe.toml").write_text(
        'model = { path = "model" }\n'
        'train = [{ path = "rows.jsonl" }, { path = "elsewhere.jsonl" }, { generator = "words:make" }]\n'
        'reward = [{ kind = "judge_it.py:score" }, { kind = "math" }]\n'
        'evaluation = { reward = [{ kind = "absent:score" }] }\nheldout = { path = "rows.jsonl" }\n'
        'env = { name = "agent", options = { hide = ["rows.jsonl", "elsewhere.jsonl"] } }\n'
    )
    for name in ("rows.jsonl", "words.py", "judge_it.py", "model"):
        (folder / name).write_text("")
    (tmp_path / "elsewhere.jsonl").write_text("")
    (tmp_path / "rows.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    (config,) = load_recipe(Path("project/recipe.toml"))
    assert config.model.path == "project/model"
    assert [source.path for source in config.train] == ["project/rows.jsonl", "elsewhere.jsonl", ""]
    assert config.train[2].generator == "project/words.py:make"
    assert [source.path for source in config.heldout] == ["project/rows.jsonl"]
    assert [part.kind for part in config.reward] == ["project/judge_it.py:score", "math"]
    assert [part.kind for part in config.evaluation.reward] == ["absent:score"]
    assert config.env.options["hide"] == ["project/rows.jsonl", "elsewhere.jsonl"]


MIXED: dict[str, Any] = {
    "model": {"path": "m"},
    "train": [
        {"path": "a/sums.jsonl", "rewards": ["math"]},
        {"generator": "mbpp", "name": "programs", "rewards": ["code"], "template": "{prompt} Write Python."},
    ],
    "heldout": [{"path": "b/sums.jsonl", "rewards": ["math"]}, {"generator": "mbpp", "size": 4, "rewards": ["code"]}],
    "reward": [{"kind": "math"}, {"kind": "code"}],
}


def test_sources_name_who_judges_them_and_survive_being_stored() -> None:
    (config,) = resolve_one(MIXED)
    assert [source.label for source in config.train] == ["sums", "programs"]
    assert [source.label for source in config.heldout] == ["sums", "mbpp"]
    assert resolve_one(tomllib.loads(to_toml([config])))[0] == config
    single = {**MIXED, "heldout": MIXED["heldout"][0]}
    (config,) = resolve_one(single)
    assert [source.label for source in config.heldout] == ["sums"], "one table is a list of one"
    stored = tomllib.loads(to_toml([config]))
    assert isinstance(stored["stage"][0]["heldout"], dict), "so that --set heldout.size changes it"
    assert resolve_one(stored)[0] == config
    (config,) = resolve_one({name: value for name, value in MIXED.items() if name != "heldout"})
    assert resolve_one(tomllib.loads(to_toml([config])))[0].heldout == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": [{"path": "a.jsonl", "rewards": ["maths"]}]}, 'source a: reward "maths" is unknown.*"math"'),
        ({"train": [{"path": "x/a.jsonl", "rewards": ["math"]}, {"path": "y/a.jsonl"}]}, 'two sources are called "a"'),
        ({"train": [{"path": "a.jsonl", "template": "no slot"}]}, "lacks the slot"),
        ({"reward": [{"kind": "math"}, {"kind": "code", "name": "math_2"}, {"kind": "math"}]}, "have one name"),
    ],
)
def test_sources_that_cannot_be_judged_as_they_say_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_one({**MIXED, "heldout": [], **change})


def test_parts_of_a_reward_are_called_by_name_by_kind_or_as_a_function_is() -> None:
    kinds = [{"kind": "math"}, {"kind": "math"}, {"kind": "mine.py:score"}, {"kind": "code", "name": "tests"}]
    assert part_names([RewardConfig(**kind) for kind in kinds]) == ["math", "math_2", "score", "tests"]


def test_a_misspelt_file_beside_the_recipe_is_looked_for_there(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "reward.py"):
        (tmp_path / "mine" / name).touch()
    table = {**tiny_recipe, "train": [{"path": "trian.jsonl"}], "reward": [{"kind": "rewrad.py:f"}]}
    (tmp_path / "mine" / "r.toml").write_text(to_toml(resolve(table, [], where="tiny")))
    config = load_recipe(Path("mine/r.toml"))[0]
    assert config.train[0].path == "mine/trian.jsonl", "its message can then name mine/train.jsonl"
    assert config.reward[0].kind == "mine/rewrad.py:f"
    (tmp_path / "trian.jsonl").touch()
    assert load_recipe(Path("mine/r.toml"))[0].train[0].path == "trian.jsonl", "what is there is what is meant"
