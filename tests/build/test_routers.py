"""Settings about routers that nothing follows are refused before the first stage begins, and those that act are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from temper.build import check_first_model, check_stages
from temper.config import RunConfig, resolve
from temper.errors import UserError

EXPERTS = {"experts": 4}
SFT, RL, REJECTION = {"kind": "sft"}, {"kind": "rl"}, {"kind": "rejection"}
PAIRS = {"kind": "preference", "reward": []}
RECORDED = {"train": [{"path": "run", "records": True}]}


def stages_of(*stages: dict[str, Any], new: dict[str, Any] | None = None, **model: Any) -> list[RunConfig]:
    table = {
        "model": {**({} if "path" in model else {"new": EXPERTS if new is None else new}), **model},
        "train": [{"generator": "spell_backward"}],
        "reward": [{"kind": "edit"}],
        "stage": list(stages) or [{}],
    }
    return resolve(table, [], where="test")


REPLAY: dict[str, Any] = {"replay_routes": True}
ON_CPU: dict[str, Any] = {**REPLAY, "device": "cpu"}
BALANCE: dict[str, Any] = {"routers": {"balance": 0.001}}


@pytest.mark.parametrize(
    ("stages", "model", "message"),
    [
        ([RL], {"new": {}, **REPLAY}, r"model\.replay_routes: routes are seen in the families .* is a llama"),
        ([SFT, RL], {"new": {}, **REPLAY}, r"stage 2 \(rl\): model\.replay_routes: routes are seen"),
        ([SFT], REPLAY, r"model\.replay_routes would do nothing: .* trains on such \(sft\)"),
        ([SFT, PAIRS], REPLAY, r"model\.replay_routes would do nothing: .* \(sft, preference\)"),
        ([REJECTION], REPLAY, r"model\.replay_routes would do nothing: .* \(rejection\)"),
        ([{"kind": "reward_model"}], REPLAY, r"model\.replay_routes would do nothing"),
        ([RL], {"replay_routes": "reference"}, r'model\.replay_routes = "reference": there is no reference'),
        ([{**RL, "engine": {"kind": "vllm"}}], ON_CPU, r"model\.replay_routes: vLLM tells its routes on a GPU alone"),
        ([SFT, {**RL, "engine": {"kind": "vllm"}}], ON_CPU, r"stage 2 \(rl\): model\.replay_routes: vLLM tells"),
        ([SFT, RL], {"new": {}, **BALANCE}, r"stage 1 \(sft\): model\.routers is made for the families .* is a llama"),
        ([RL], {"new": {}, "routers": {"frozen": True}}, r"model\.routers is made for the families"),
        ([RL], {"routers": {"bias": 0.001}}, r"model\.routers\.bias: routers of a qwen3_moe have no bias"),
        ([RL], {**BALANCE, "lora": {}}, r"model\.routers: with model\.lora routers are frozen already"),
        ([SFT, {**RL, "objective": {"preset": "trpo"}}], {"routers": {"bias": 1}}, r"stage 1 \(sft\): .*have no bias"),
        ([REJECTION], BALANCE, r"model\.routers would do nothing: a stage of kind rejection trains nothing"),
        ([{"kind": "reward_model"}], BALANCE, r"model\.routers\.balance would do nothing: routers of a reward model"),
        ([{"kind": "reward_model"}], {"routers": {"z": 0.1}}, r"model\.routers\.z would do nothing"),
        (
            [SFT, {**RL, "objective": {"preset": "rspo"}}],
            {"new": {}},
            r"stage 2 \(rl\): objective rspo needs a mixture",
        ),
    ],
)
def test_what_routers_cannot_follow_is_refused_by_name(
    stages: list[dict[str, Any]], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_stages(stages_of(*stages, **model))


@pytest.mark.parametrize(
    ("stages", "model"),
    [
        ([SFT, RL], REPLAY),
        ([RL], {**REPLAY, "lora": {}}),
        ([RL], {"replay_routes": "measure"}),
        ([{**RL, "engine": {"numerics": "exact"}}], REPLAY),  # route/moved_frac says that no route moved
        ([{**RL, "engine": {"kind": "sglang", "address": "http://127.0.0.1:30000"}}], REPLAY),
        ([SFT, {"kind": "preference"}], REPLAY),  # its data says whether pairs are drawn
        ([{"kind": "distill", "model": {"teacher": "stage:first"}}], REPLAY),
        ([{**RL, "objective": {"preset": "ppo"}}], {"replay_routes": "reference"}),
        ([SFT, RL], BALANCE),
        ([SFT], {"routers": {"frozen": True}}),
        ([REJECTION, SFT], BALANCE),
        ([{"kind": "reward_model"}], {"routers": {"frozen": True}}),
        ([{"kind": "reward_model"}, RL], BALANCE),
        ([{**RL, "objective": {"preset": "rspo"}}], {}),
        ([SFT, RL], {"new": {}, "routers": None}),
    ],
)
def test_what_acts_somewhere_in_the_recipe_is_allowed(stages: list[dict[str, Any]], model: dict[str, Any]) -> None:
    check_stages(stages_of(*stages, **{key: value for key, value in model.items() if value is not None}))


def written(family: str, folder: Path) -> Path:
    AutoConfig.for_model(family).save_pretrained(folder)
    return folder


def test_a_model_that_lies_here_is_looked_at_and_one_on_the_hub_when_it_has_come(tmp_path: Path) -> None:
    dense, glm = written("qwen3", tmp_path / "dense"), written("glm4_moe", tmp_path / "glm")
    with pytest.raises(UserError, match=r"stage 2 \(rl\): model\.replay_routes: .* is a qwen3\."):
        check_stages(stages_of(SFT, RL, path=str(dense), **REPLAY))
    with pytest.raises(
        UserError, match=r"model\.routers\.z: it is a loss over a softmax .* a glm4_moe scores them one by one"
    ):
        check_stages(stages_of(path=str(glm), routers={"z": 0.001}))
    with pytest.raises(UserError, match=r"objective rspo: how glm4_moe chooses its experts is not known"):
        check_stages(stages_of({**RL, "objective": {"preset": "rspo"}}, path=str(glm)))
    with pytest.raises(UserError, match=r'objective "trpo" takes steps of its own. Leave bias out'):
        check_stages(stages_of({**RL, "objective": {"preset": "trpo"}}, path=str(glm), routers={"bias": 0.001}))
    check_stages(stages_of(path=str(glm), routers={"bias": 0.001}, **REPLAY))
    check_stages(stages_of(path=str(glm), **BALANCE))
    far = stages_of(SFT, RL, path="Qwen/Qwen3-30B-A3B", **REPLAY)
    check_stages(far)
    with pytest.raises(UserError, match=r"stage 2 \(rl\): model\.replay_routes"):
        check_first_model(far, dense)
    check_first_model(far, glm)


def test_a_stage_that_starts_elsewhere_is_held_against_the_model_it_names(tmp_path: Path) -> None:
    dense = written("qwen3", tmp_path / "dense")
    with pytest.raises(UserError, match=r"stage 2 \(rl\): model\.replay_routes: .* is a qwen3\."):
        check_stages(
            stages_of(
                SFT, {**RL, "model": {"path": str(dense)}}, path=str(written("qwen3_moe", tmp_path / "m")), **REPLAY
            )
        )
    back = {**RL, "model": {"path": "stage:first", "replay_routes": True}}
    with pytest.raises(UserError, match=r"stage 2 \(rl\): model\.replay_routes: .* is a llama"):
        check_stages(stages_of(SFT, back, new={}))
