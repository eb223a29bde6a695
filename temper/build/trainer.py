"""Opening the trainer of a stage, on one process or on all trainer ranks.

Owns: what a rank has to be told so that it opens what rank 0 opens. Refuses: what trainers do (trainer/), and starting
ranks (cluster/ranks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from temper.batching.pack import pack_over_ranks, shard
from temper.build.models import Models, load_models, optimizer_settings
from temper.build.objective import resolve_objective
from temper.config import RunConfig
from temper.config.memory import settled_choice
from temper.models.experts.balance import BalanceSettings, freeze_routers, set_balance, set_bias_rate
from temper.models.experts.routes import set_replaying
from temper.protocols import Trainer
from temper.stages.kinds import kind_of
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.ranks.context import go_together
from temper.trainer.ranks.ranked import OPEN, RankedTrainer, Together
from temper.trainer.ranks.sums import rank_and_world


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOrder:
    """A stage, as far as its trainer goes. Sent to other ranks: everything in it can be pickled."""

    config: RunConfig
    """Settled: what "auto" stands for was found on rank 0."""
    folder: Path
    """The model that it starts from."""
    checkpoint: Path | None
    """Where it goes on."""
    is_rolling: bool
    """Whether rows are drawn at sampling.temperature."""


def open_everywhere(order: TrainerOrder, tokenizer: Any, together: Together | None) -> tuple[Trainer, Models]:
    """The trainer of a stage and the models of this process. together: all ranks; None: there is one."""
    if together is None:
        return open_here(order, tokenizer)
    trainer, models = together.do(OPEN, order, lambda: open_here(order, tokenizer))
    return RankedTrainer(trainer, together), models


def open_here(order: TrainerOrder, tokenizer: Any = None) -> tuple[LocalTrainer, Models]:
    """The trainer of this rank. tokenizer: needed by the one that writes checkpoints."""
    config = order.config
    objective = resolve_objective(config)
    if rank_and_world()[1] > 1:
        go_together(config.cluster.together, config.cluster.rank_seconds)
    models = load_models(config, objective, order.folder)
    if (routers := config.model.routers) is not None:
        set_balance(models.policy, BalanceSettings(balance=routers.balance, z=routers.z))
        set_bias_rate(models.policy, routers.bias)
        if routers.frozen:
            freeze_routers(models.policy)
    if order.is_rolling and config.model.replay_routes and not config.is_recorded:  # servers record no routes
        set_replaying(models.policy, True, only_measures=config.model.replay_routes == "measure")
        if models.others.reference is not None:
            set_replaying(models.others.reference, config.model.replay_routes == "reference")
    choice = settled_choice(config)
    settings = TrainerSettings(
        optimizer=optimizer_settings(config, config.optim.learning_rate),
        temperature=config.sampling.temperature if order.is_rolling else 1.0,
        total_steps=config.steps,
        gradient_checkpointing=choice.gradient_checkpointing,
        seed=config.seed,
        is_ordered=config.trainer.reproducible and config.rollout.max_staleness == 0,
        files=models.files,
    )
    trainer = LocalTrainer(
        models.policy,
        tokenizer,
        objective,
        settings,
        pack=partial(
            pack_over_ranks,
            tokens_per_microbatch=choice.tokens_per_microbatch,
            num_ranks=rank_and_world()[1] // config.cluster.together,
            together=kind_of(config).together,
        ),
        shard=shard,
        others=models.others,
    )
    if order.checkpoint is not None:
        trainer.load(order.checkpoint)
    return trainer, models
