"""What a recipe gets wrong about its kinds of stages is said before anything is read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from temper.build import check_stages
from temper.config import RunConfig, resolve
from temper.errors import UserError
from temper.objectives import PRESETS
from temper.stages.kinds import KINDS, OTHER_KINDS


def stages_of(*stages: dict[str, Any], **shared: Any) -> list[RunConfig]:
    table = {
        "model": {"new": {}},
        "train": [{"generator": "spell_backward"}],
        "reward": [{"kind": "edit"}],
        "stage": list(stages) or [{}],
        **shared,
    }
    return resolve(table, [], where="test")


def distilled(preset: str) -> dict[str, Any]:
    return {"model": {"new": {}, "teacher": "somewhere"}, "objective": {"preset": preset}}


HELDOUT = {"generator": "spell_backward", "size": 4, "seed": 1}
UNEVEN = {"rollout": {"groups_per_step": 5}, "trainer": {"updates_per_batch": 2}}


@pytest.mark.parametrize("kind", ["rl", "rejection"])
def test_a_kind_that_lives_by_its_reward_needs_one(kind: str) -> None:
    with pytest.raises(UserError, match=r"add a \[\[reward\]\] table"):
        check_stages(stages_of({"kind": kind}, reward=[]))


def test_held_out_answers_need_a_judge_and_held_out_pairs_do_not() -> None:
    check_stages(stages_of({"kind": "sft"}, reward=[]))
    with pytest.raises(UserError, match=r"add a \[\[reward\]\] table"):
        check_stages(stages_of({"kind": "sft"}, reward=[], heldout=HELDOUT))
    check_stages(stages_of({"kind": "reward_model"}, reward=[], heldout=HELDOUT))
    check_stages(stages_of({"kind": "preference"}, reward=[], heldout=HELDOUT))  # data says whether these are pairs


MOVING = {
    "objective": {"reference": {"name": "reset", "every": 1}, "regularizers": [{"name": "kl", "coefficient": 0.001}]}
}
SGLANG = {"kind": "sglang", "address": "http://127.0.0.1:30000"}


@pytest.mark.parametrize(
    ("stage", "shared", "message"),
    [
        ({}, {"engine": {"kind": "vllm"}}, 'engine.kind="vllm" reads merged weights'),
        ({}, {"engine": SGLANG}, 'engine.kind="sglang" reads merged weights'),
        ({}, {"engine": {"weights": "fp8"}}, "sampler and trainer share the base"),
        ({}, MOVING, "a reference that moves"),
        ({"kind": "reward_model"}, {}, "a reward model is read in full"),
    ],
)
def test_what_cannot_be_done_over_a_base_in_four_bits_is_refused_by_name(
    stage: dict[str, Any], shared: dict[str, Any], message: str
) -> None:
    for base in ("full", "4bit"):
        config = stages_of(stage, **{**shared, "model": {"new": {}, "lora": {"base": base}}})
        if base == "full":
            check_stages(config)
            continue
        with pytest.raises(UserError, match=message):
            check_stages(config)


@pytest.mark.parametrize(
    ("stage", "shared", "message"),
    [
        ({}, {"engine": {"place": "here"}}, 'does not hold a whole model to draw with. Set engine.place = "process"'),
        ({}, {"model": {"new": {}, "lora": {"base": "4bit"}}}, 'Use model.lora.base = "full"'),
        ({}, {"model": {"new": {}, "lora": {"targets": ["experts"]}}}, 'Leave "experts" out of model.lora.targets'),
        ({}, {"model": {"new": {}, "offload": True}}, "Leave out model.offload"),
        ({}, {"optim": {"states": "8bit"}}, 'Use optim.states = "bfloat16"'),
        ({}, {"objective": {"preset": "trpo"}}, "takes steps of its own, over whole weights"),
        ({"kind": "distill"}, {"model": {"new": {}, "teachers": {"a": "x", "b": "y"}}}, "Use one model.teacher"),
    ],
)
def test_what_cannot_be_done_with_parts_of_a_model_is_refused_by_name(
    stage: dict[str, Any], shared: dict[str, Any], message: str
) -> None:
    process = {"place": "process"}
    for parts in (False, True):
        keys = {"engine": process, **shared, "cluster": {"trainers": 2, "parts": parts}}
        config = stages_of(stage, **keys)
        if not parts:
            check_stages(config)
            continue
        with pytest.raises(UserError, match=re.escape(message)) as raised:
            check_stages(config)
        assert "or use cluster.parts = false" in str(raised.value)


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ({"cluster": {"trainers": 2, "experts": True}}, "Set cluster.parts = true, too"),
        (
            {"cluster": {"trainers": 2, "parts": True, "experts": True}, "model": {"new": {"experts": 4}, "lora": {}}},
            "an adapter leaves experts as they are",
        ),
    ],
)
def test_what_cannot_be_done_with_experts_that_stay_is_refused_by_name(shared: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_stages(stages_of({}, engine={"place": "process"}, **shared))


@pytest.mark.parametrize(
    ("stage", "shared", "message"),
    [
        ({"kind": "reward_model"}, {}, 'a reward model reads whole rows (objective "reward_model")'),
        ({}, {"objective": {"preset": "ppo"}}, 'a critic reads whole rows (objective "ppo")'),
        ({}, {"objective": {"preset": "trpo"}}, "takes steps of its own, over whole rows"),
        (
            {},
            {"model": {"new": {"experts": 4}}, "objective": {"preset": "rspo"}},
            "routers are read from states of all tokens",
        ),
        ({}, {"model": {"new": {"experts": 4}, "routers": {"balance": 0.1}}}, "routers are read from whole rows"),
        ({}, {"sampling": {"top_k": 5}}, "Leave out sampling.top_k, top_p and min_p"),
        ({}, {"sampling": {"top_p": 0.9}}, "Leave out sampling.top_k, top_p and min_p"),
        ({}, {"sampling": {"min_p": 0.05}}, "Leave out sampling.top_k, top_p and min_p"),
        ({"kind": "distill"}, distilled("gkd"), "whole distributions are compared with states of all tokens"),
        (
            {"kind": "distill"},
            distilled("opd_top_k"),
            "a teacher's most likely tokens are read from states of all tokens",
        ),
        ({}, {"objective": {"preset": "simko"}}, "the policy's most likely tokens are read from states of all tokens"),
        ({"kind": "sft"}, {"objective": {"preset": "sft", "loss": {"noise": 5.0}}}, "noise on embeddings"),
        ({"kind": "sft"}, {"objective": {"preset": "sft", "loss": {"smoothing": 0.1}}}, "label smoothing reads states"),
    ],
)
def test_what_cannot_be_done_where_several_go_over_a_row_is_refused_by_name(
    stage: dict[str, Any], shared: dict[str, Any], message: str
) -> None:
    for context in (1, 2):
        config = stages_of(stage, **{"cluster": {"trainers": 2, "context": context}, **shared})
        if context == 1:
            check_stages(config)
            continue
        with pytest.raises(UserError, match=re.escape(message)) as raised:
            check_stages(config)
        assert "or use cluster.context = 1" in str(raised.value)


@pytest.mark.parametrize(
    ("cluster", "shared", "message"),
    [
        ({"parts": True, "context": 2}, {}, "go over rows together already. Leave out cluster.context"),
        ({}, {}, "Set cluster.parts = true, too"),
        ({"parts": True}, {"model": {"new": {}, "lora": {"rank": 4}}}, "Leave out model.lora"),
        ({"parts": True}, {"engine": {"place": "process", "numerics": "exact"}}, 'Use engine.numerics = "fast"'),
        ({"parts": True}, {"objective": {"preset": "ppo"}}, 'a critic reads whole rows (objective "ppo")'),
        ({"parts": True}, {"sampling": {"top_k": 5}}, "Leave out sampling.top_k, top_p and min_p"),
    ],
)
def test_what_layers_that_several_compute_are_not_made_for_is_refused_by_name(
    cluster: dict[str, Any], shared: dict[str, Any], message: str
) -> None:
    shared = {"engine": {"place": "process"}, **shared}
    check_stages(stages_of({}, cluster={"trainers": 2, "parts": True, "tensor": 2}, engine={"place": "process"}))
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        check_stages(stages_of({}, **{"cluster": {"trainers": 2, "tensor": 2, **cluster}, **shared}))
    assert "cluster.tensor: " in str(raised.value)
    assert "or use cluster.tensor = 1" in str(raised.value)


def test_trainers_are_those_of_all_stages() -> None:
    stages = [*stages_of({"kind": "sft"}, cluster={"trainers": 2}), *stages_of({}, cluster={"trainers": 3})]
    with pytest.raises(UserError, match=r"cluster.trainers: those of all stages"):
        check_stages(stages)


@pytest.mark.parametrize(
    "key", [{"address": "auto"}, {"place": "processes"}, {"rank_seconds": 5.0}, {"max_restarts": 7}]
)
def test_where_processes_run_and_how_long_they_may_be_silent_is_said_for_all_stages(key: dict[str, Any]) -> None:
    """The first stage's count: another's would do nothing."""
    trainers = {"trainers": 2}
    stages = [*stages_of({"kind": "sft"}, cluster=trainers), *stages_of({}, cluster=trainers | key)]
    with pytest.raises(UserError, match=f"cluster.{next(iter(key))}: those of all stages"):
        check_stages(stages)


def test_samplers_may_be_replaced_more_often_in_one_stage_than_in_another() -> None:
    place = {"engine": {"place": "process"}}
    check_stages([*stages_of({}, **place), *stages_of({}, **place, cluster={"max_restarts": 7})])


def test_a_ray_cluster_needs_something_to_place_in_any_stage() -> None:
    ray = {"cluster": {"place": "ray"}}
    with pytest.raises(UserError, match="a Ray cluster places sampler processes and trainers, and there are none"):
        check_stages([*stages_of({"kind": "sft"}, **ray), *stages_of({}, **ray)])
    check_stages([*stages_of({"kind": "sft"}, **ray), *stages_of({}, **ray, engine={"place": "process"})])
    elsewhere = {"place": "ray", "samplers": ["gpu7:29600"]}
    with pytest.raises(UserError, match="samplers by address stand where they are"):
        check_stages(stages_of({}, engine={"place": "process"}, cluster=elsewhere))


@pytest.mark.parametrize("kind", ["rl", "preference"])
def test_groups_divide_over_the_updates_of_a_step(kind: str) -> None:
    with pytest.raises(UserError, match="groups_per_step=6"):
        check_stages(stages_of({"kind": kind}, **UNEVEN))
    check_stages(stages_of({"kind": "sft"}, **UNEVEN))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("grpo", '"grpo" is a preset. Write kind = "rl" and objective = { preset = "grpo" }.'),
        ("ipo", 'kind = "preference" and objective = { preset = "ipo" }'),
        ("rejektion", '"rejektion" is no kind of stage. Did you mean "rejection"'),
        ("finetune", 'Did you mean "sft"?'),
        ("other", "Kinds: rl, sft, reward_model, rejection, preference, distill."),
    ],
)
def test_a_kind_that_is_none_is_answered_with_the_nearest(kind: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        check_stages(stages_of({"kind": kind}))
    assert message in str(raised.value)


def test_other_words_for_kinds_are_no_kinds_and_lead_to_one() -> None:
    assert set(OTHER_KINDS.values()) <= KINDS.keys()
    assert not {*PRESETS, *OTHER_KINDS} & (KINDS.keys() - {"sft", "reward_model"})


def test_of_several_stages_the_wrong_one_is_named() -> None:
    with pytest.raises(UserError, match=r"stage 2 \(rl\): objective\.gate \"clp\" is unknown"):
        check_stages(stages_of({"kind": "sft"}, {"kind": "rl", "objective": {"gate": "clp"}}))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (({"kind": "rl"}, {"kind": "rl", "model": {"path": "stage:sft"}}), "no stage before it is of that kind"),
        (({"kind": "rl"}, {"kind": "sft", "train": [{"path": "stage:rl"}]}), "from a stage of kind rejection"),
        (({"kind": "rejection"}, {"kind": "rl", "model": {"path": "stage:rejection"}}), "leaves rows and no model"),
        (({"kind": "reward_model"}, {"kind": "rl", "model": {"path": "stage:reward_model"}}), "leaves a reward model"),
        (({"kind": "rejection"}, {"kind": "sft", "train": [{"path": "stage:rejection"}]}), None),
        (({"kind": "reward_model"}, {"kind": "reward_model", "model": {"path": "stage:reward_model"}}), None),
        (({"kind": "sft"}, {"kind": "rl", "model": {"new": {"width": 96}}}), "only the first stage can make a model"),
    ],
)
def test_a_stage_reads_what_an_earlier_one_leaves(stages: tuple[dict[str, Any], ...], message: str | None) -> None:
    configs = stages_of(*stages)
    if message is None:
        check_stages(configs)
        return
    with pytest.raises(UserError, match=message):
        check_stages(configs)
