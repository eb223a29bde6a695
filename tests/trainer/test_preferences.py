"""Preferences through the trainer: the loss is that of log-probabilities from an ordinary forward pass, no packing
changes a step, and a run that was cut goes on to the same bits."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.batching.pack import pack
from temper.models.tiny import character_tokenizer
from temper.objectives import Objective
from temper.objectives.losses.preferences import PREFERENCES, Pairs, preference_loss
from temper.objectives.presets.preferences import BETA_DPO, DPO, KTO, NASH_MD, PRESETS, XPO
from temper.rollout.buffer import StepGroups
from temper.stages.preference import offline_source, pair_batch
from temper.stages.preference_credit import pairs_of, wins_of
from temper.stages.reading.preference_rows import RowRules, pair_rows
from temper.stages.reading.reference_cache import References
from temper.tasks.dataset import FileSource, Stream
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import (
    Batch,
    Completion,
    Finish,
    Group,
    Message,
    Sample,
    Score,
    Status,
    Task,
    Trajectory,
    Turn,
)
from tests.fakes.episodes import Letters

OPTIMIZER = OptimizerSettings(learning_rate=0.01, max_grad_norm=1e6)
OFFLINE = [preset for preset in PRESETS if preset.name not in ("online_dpo", "nash_md")]


def tasks(count: int = 6, seed: int = 0) -> tuple[Task, ...]:
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randint(1, 12)))

    return tuple(
        Task(
            id=f"p{number}",
            messages=(Message(role="user", content=text()),),
            answer=text(),
            extra={"rejected": text(), "is_chosen_from_policy": number % 2 == 0},
        )
        for number in range(count)
    )


RULES = RowRules(Letters(shift=90), 64)
DRAWS = list(enumerate(tasks()))


def make_trainer(model: Any, objective: Objective, budget: int = 60, reference: Any = None) -> LocalTrainer:
    settings = TrainerSettings(optimizer=OPTIMIZER, temperature=1.0, total_steps=10)
    packing = partial(pack, tokens_per_microbatch=budget, dtype=torch.float64, together="group")
    others = AuxiliaryModels(reference=reference)
    return LocalTrainer(model, character_tokenizer("abc"), objective, settings, pack=packing, others=others)


def offline_batch(trainer: LocalTrainer, objective: Objective) -> Batch:
    source = offline_source(
        objective, Stream([FileSource("pairs", tasks())], [1.0], seed=0), RULES, References(trainer.score),
        trainer.score, 6,
    )  # fmt: skip
    return asyncio.run(source.take(1))


def weights(trainer: LocalTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}


def difference(left: LocalTrainer, right: LocalTrainer) -> float:
    first, second = weights(left), weights(right)
    return max((first[name] - second[name]).abs().max().item() for name in first)


def plain_sums(model: Any, rows: Sequence[Sample]) -> Tensor:
    """Summed log-probabilities of the completions by transformers' own forward pass, one row at a time."""
    sums = []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        sums.append(sum(logprobs[place - 1, row.token_ids[place]] for place, m in enumerate(row.loss_mask) if m))
    return torch.stack(sums)


@pytest.mark.parametrize("name", sorted(PREFERENCES))
def test_the_loss_is_that_of_an_ordinary_forward_pass(name: str, make_model: Callable[..., Any]) -> None:
    objective = next(preset for preset in OFFLINE if preset.name == name)
    policy, reference = make_model(seed=0), make_model(seed=1)
    trainer = make_trainer(policy, objective, reference=reference)
    batch = pair_batch(DRAWS, RULES, References(trainer.score))
    (rows,) = batch.updates
    by_policy, by_reference = (plain_sums(make_model(seed=seed, is_plain=True), rows).view(-1, 2) for seed in (0, 1))
    lengths = torch.tensor([row.num_actions for row in rows]).view(-1, 2)
    pairs = Pairs(
        chosen_logprobs=by_policy[:, 0], rejected_logprobs=by_policy[:, 1],
        chosen_lengths=lengths[:, 0], rejected_lengths=lengths[:, 1],
        weights=torch.full((len(DRAWS),), 1 / len(DRAWS), dtype=torch.float64),
        reference_chosen_logprobs=by_reference[:, 0], reference_rejected_logprobs=by_reference[:, 1],
        is_chosen_from_policy=torch.tensor([True, False] * 3),
    )  # fmt: skip
    expected, sums = preference_loss(PREFERENCES[name](), pairs)
    result = trainer.step(batch)
    assert result.loss == pytest.approx(expected.item(), rel=1e-9)
    finished = sums.finish()
    for metric in ("margin", "accuracy", "chosen_logprob", "rejected_logprob"):
        assert result.metrics[f"preference/{metric}"] == pytest.approx(finished[f"preference/{metric}"], rel=1e-9)
    assert result.metrics["policy/grad_norm"] > 1e-4


@pytest.mark.parametrize("objective", OFFLINE, ids=lambda objective: objective.name)
def test_a_step_does_not_depend_on_the_size_of_microbatches(
    objective: Objective, make_model: Callable[..., Any]
) -> None:
    trainers = [make_trainer(make_model(), objective, budget, make_model(seed=1)) for budget in (1, 60, 4000)]
    results = [trainer.step(offline_batch(trainer, objective)) for trainer in trainers]
    for trainer, result in zip(trainers[1:], results[1:], strict=True):
        assert result.loss == pytest.approx(results[0].loss, rel=1e-9)
        assert difference(trainer, trainers[0]) < 1e-7
        assert dict(result.metrics) == pytest.approx(dict(results[0].metrics), rel=1e-6, abs=1e-9)
    assert difference(trainers[0], make_trainer(make_model(), objective, 60, make_model(seed=1))) > 1e-4


def test_the_check_rejects_weights_of_a_microbatch(make_model: Callable[..., Any]) -> None:
    """The mutation: each microbatch divides by its own pairs."""
    trainer = make_trainer(make_model(), DPO, 1, make_model(seed=1))
    right = make_trainer(make_model(), DPO, 1, make_model(seed=1))
    (rows,) = offline_batch(trainer, DPO).updates
    wrong = [dataclasses.replace(row, weights=[float(m) for m in row.loss_mask]) for row in rows]
    losses = [trainer.step(Batch(updates=(tuple(wrong),))).loss, right.step(Batch(updates=(rows,))).loss]
    assert losses[0] != pytest.approx(losses[1])


def test_rows_packed_one_by_one_are_refused(make_model: Callable[..., Any]) -> None:
    trainer = make_trainer(make_model(), DPO, reference=make_model(seed=1))
    trainer._pack = partial(pack, tokens_per_microbatch=1)
    with pytest.raises(AssertionError, match="together"):
        trainer.step(offline_batch(trainer, DPO))


def test_exactly_the_tokens_of_the_completions_are_scored(make_model: Callable[..., Any]) -> None:
    """End tokens are, prompts are not; each score is that of an ordinary forward pass."""
    trainer = make_trainer(make_model(), DPO, 1, make_model(seed=1))
    rows = [row for task in tasks(3) for row in pair_rows(RULES, task)]
    plain = make_model(is_plain=True)
    for row, scores in zip(rows, trainer.score(rows, "policy"), strict=True):
        with torch.no_grad():
            logprobs = plain(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        said = row.loss_mask.index(1)
        expected = [0.0] * said
        expected += [logprobs[place - 1, row.token_ids[place]].item() for place in range(said, len(row.token_ids))]
        assert scores == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("objective", [DPO, KTO, BETA_DPO], ids=lambda objective: objective.name)
def test_training_that_was_saved_and_loaded_goes_on_to_the_same_bits(
    objective: Objective, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    def start(folder: Path) -> tuple[LocalTrainer, Any]:
        trainer = make_trainer(make_model(dtype=torch.float32), objective, 60, make_model(seed=1, dtype=torch.float32))
        references = References(trainer.score, folder / "references.bin")
        stream = Stream([FileSource("pairs", tasks(5))], [1.0], seed=0)
        return trainer, offline_source(objective, stream, RULES, references, trainer.score, 3)

    async def go(trainer: LocalTrainer, source: Any, first: int, last: int) -> list[float]:
        await source.start()
        return [trainer.step(await source.take(step)).loss for step in range(first, last + 1)]

    whole, source = start(tmp_path / "whole")
    losses = asyncio.run(go(whole, source, 1, 6))
    cut, source = start(tmp_path / "cut")
    assert asyncio.run(go(cut, source, 1, 3)) == losses[:3]
    (tmp_path / "saved").mkdir()
    cut.save(tmp_path / "saved")
    state = source.state()
    # The killed process got one step further than its checkpoint.
    asyncio.run(go(cut, source, 4, 4))
    resumed, source = start(tmp_path / "cut")
    resumed.load(tmp_path / "saved")
    source.load_state(state)
    assert asyncio.run(go(resumed, source, 4, 6)) == losses[3:]
    assert difference(resumed, whole) == 0.0
    if objective is BETA_DPO:
        assert resumed.scales["beta_dpo.mean"] == whole.scales["beta_dpo.mean"] != 0.0


def test_dpo_separates_pairs_and_its_implicit_rewards_start_at_zero(make_model: Callable[..., Any]) -> None:
    policy = make_model(dtype=torch.float32)
    trainer = make_trainer(policy, DPO, 4000, copy.deepcopy(policy))
    batch = pair_batch(DRAWS, RULES, References(trainer.score))
    first = trainer.step(batch)
    assert first.loss == pytest.approx(0.693147, abs=1e-6)
    assert first.metrics["preference/margin"] == pytest.approx(0.0, abs=1e-6)
    for _ in range(8):
        last = trainer.step(batch)
    assert last.metrics["preference/accuracy"] == 1.0
    assert last.loss < 0.4


# --- from rollouts ---


def rolled(seed: int = 0) -> StepGroups:
    """Groups of two members of the policy and one opponent."""
    draw = random.Random(seed)
    groups = []
    for number in range(4):
        members = []
        for index in range(3):
            ids = [draw.randrange(40) for _ in range(draw.randint(1, 9))]
            completion = Completion(
                prompt_ids=(1, 2, 3), token_ids=ids, logprobs=[-3.0] * len(ids),
                versions=[0 if index < 2 else -1] * len(ids), finish=Finish.STOP,
            )  # fmt: skip
            turn = Turn(completion=completion, message=Message(role="assistant", content="x"))
            # One member in two rows: its template rewrote history, so the second turn's prompt is another.
            again = dataclasses.replace(turn, completion=dataclasses.replace(completion, prompt_ids=(9, 9)))
            members.append(
                Trajectory(
                    task_id="t",
                    group_id=f"t#{number}",
                    index=index,
                    turns=(turn, again) if index == 1 else (turn,),
                    status=Status.COMPLETED,
                    score=Score.of(float((index + number) % 3)),
                )
            )
        task = Task(id="t", messages=(Message(role="user", content="x"),))
        groups.append(Group(id=f"t#{number}", draw=number, task=task, trajectories=tuple(members)))
    return StepGroups(groups=tuple(groups), dropped=())


ONLINE: list[tuple[Objective, Callable[..., Batch]]] = [
    (DPO, pairs_of), (BETA_DPO, pairs_of), (XPO, partial(pairs_of, choose="sides")), (NASH_MD, wins_of),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "credit"), ONLINE, ids=["dpo", "beta_dpo", "xpo", "nash_md"])
def test_a_step_on_rollouts_does_not_depend_on_the_size_of_microbatches(
    objective: Objective, credit: Callable[..., Batch], make_model: Callable[..., Any]
) -> None:
    """Members of several rows are one side, summed over all of them."""
    trainers = [make_trainer(make_model(), objective, budget, make_model(seed=1)) for budget in (1, 40, 4000)]
    results = [trainer.step(credit(rolled(), version=0)) for trainer in trainers]
    for trainer, result in zip(trainers[1:], results[1:], strict=True):
        assert result.loss == pytest.approx(results[0].loss, rel=1e-9)
        assert difference(trainer, trainers[0]) < 1e-7
    assert results[0].metrics["policy/grad_norm"] > 1e-4
    assert results[0].traces is not None
    assert not any(name.startswith("mismatch/") for name in results[0].metrics), "no opponent is the policy"
    members = {(group.id, member.index) for group in rolled().groups for member in group.trajectories}
    assert {(name, index) for name, index, _ in results[0].traces} <= members


def test_nash_md_makes_winners_likelier_than_losers(make_model: Callable[..., Any]) -> None:
    policy = make_model(dtype=torch.float32)
    trainer = make_trainer(policy, NASH_MD, 4000, copy.deepcopy(policy))
    batch = wins_of(rolled(), version=0)
    (rows,) = batch.updates

    def advantage() -> float:
        """Mean log-probability of the winners' rows over the losers'."""
        sums = [sum(row) for row in trainer.score(rows, "policy")]
        wins = [row.advantages[-1] - 0.5 for row in rows]
        return sum(win * total for win, total in zip(wins, sums, strict=True))

    before = advantage()
    for _ in range(5):
        trainer.step(batch)
    assert advantage() > before + 1.0
