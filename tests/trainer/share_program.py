"""One of several ranks with a share of a batch, started by start_ranks.py. Reads inputs.pkl in the folder.

Run by test_critic.py and test_trust_region.py: per case one update of a critic or one step of a policy.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from temper.batching.pack import shard
from temper.objectives import PRESETS
from temper.objectives.policy.constrained import trpo
from temper.objectives.policy.gates import importance
from temper.trainer.critic import Critic, explained
from temper.trainer.passes.forward import StepFacts
from temper.trainer.passes.scoring import Share
from temper.trainer.trust_region import constrained_step
from temper.types import Microbatch


def update_critic(critic: Critic, share: list[Microbatch], num_batch_tokens: int) -> Any:
    metrics = critic.step(Share(share, list(range(len(share)))), clip=0.2, num_batch_tokens=num_batch_tokens, step=1)
    moments = {name: t for name, t in critic._optimizer.tensors().items() if name.startswith("exp_avg.")}
    return moments, explained(metrics.finish())


def step_policy(model: Any, share: list[Microbatch], num_batch_tokens: int, temperature: float) -> Any:
    facts = StepFacts(num_batch_tokens=num_batch_tokens)
    objective = replace(PRESETS["grpo"], gate=importance(), step=trpo())
    metrics = constrained_step(model, share, objective, temperature=temperature, facts=facts)
    return [parameter.detach() for parameter in model.parameters()], metrics.finish()


KINDS: dict[str, Callable[..., Any]] = {"critic": update_critic, "trust_region": step_policy}


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store, limit = dist.FileStore(str(folder / "store"), world), datetime.timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    reports = []
    for kind, learner, microbatches, *rest in pickle.loads((folder / "inputs.pkl").read_bytes()):
        reports.append(
            KINDS[kind](deepcopy(learner), [microbatches[place] for place in shard(microbatches, rank, world)], *rest)
        )
    torch.save(reports, folder / f"{rank}.pt")
    dist.destroy_process_group()
