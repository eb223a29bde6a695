"""From a configuration to the live parts of one stage.

Owns: which parts are made and how they are wired. Refuses: training (loop.py), checking data (data.py), and what the
loop calls back (plan.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from temper.batching.pack import pack, shard
from temper.batching.samples import CreditRules, make_batch
from temper.build.sampler import make_sampler
from temper.config import RunConfig
from temper.data import StageData, open_data
from temper.envs.env import find_env
from temper.errors import UserError
from temper.evals.evaluate import Evaluation, HeldOut, constant_answer_score, evaluate
from temper.models.load import find_checkpoint, load_model, require_same_tokenizer
from temper.models.tiny import make_tiny_model
from temper.objectives import Objective, check_objective, resolve
from temper.objectives.resolve import REGISTRY
from temper.protocols import BatchSource, Env, Sampler
from temper.rollout.buffer import Buffer, Taken
from temper.rollout.episode import EpisodeSetup
from temper.rollout.gate import Canary
from temper.rollout.group import Extras
from temper.rollout.roller import Roller, RollSettings
from temper.rollout.steps import StepSplit
from temper.runs.records import AuditRecord
from temper.stages.sft import Examples, supervised_objective
from temper.trainer.checkpoint import read_checkpoint
from temper.trainer.critic import Critic
from temper.trainer.optim import OptimizerSettings
from temper.trainer.trainer import LocalTrainer, OtherModels, TrainerSettings
from temper.types import Batch, EvaluationResult, SamplingParams


@dataclass(kw_only=True)
class Stage:
    """The live parts of one stage."""

    config: RunConfig
    index: int
    data: StageData
    model: torch.nn.Module
    trainer: LocalTrainer
    sampler: Sampler
    held: torch.nn.Module | None
    """The sampler's weights: the model, or a copy when it samples while the model is trained. None: elsewhere."""
    source: BatchSource
    setup: EpisodeSetup
    note: Callable[[str], None] = print
    """Where facts about the run go: the store's events."""
    warn: Callable[[str], None] = print
    """Where doubts about the run go: the same, more loudly."""
    audit: Callable[[Sequence[AuditRecord]], None] | None = None
    """Where held-out transcripts go; None: nowhere."""
    heldout: HeldOut | None = None
    """None before the first evaluation."""
    canary: Canary | None = None
    """None before the gate has passed, and in supervised stages."""

    async def evaluate(self, step: int, metrics: Mapping[str, float] | None = None) -> list[EvaluationResult]:
        """Greedy and sampled held-out scores of the weights the sampler holds. metrics: of the step they come from."""
        config = self.config.evaluation
        if self.heldout is None:
            self.heldout = await _held_out(self)
        ways = (
            Evaluation(name="greedy", temperature=0.0, samples=1, max_new_tokens=config.max_new_tokens),
            Evaluation(
                name="sampled",
                temperature=config.temperature or self.config.sampling.temperature,
                samples=config.samples,
                max_new_tokens=config.max_new_tokens,
                top_p=config.top_p,
            ),
        )
        reward = (metrics or {}).get("reward/mean")
        results = []
        for way in ways:
            result, audits = await evaluate(self.heldout, way, stage=self.index, step=step, reward=reward)
            if self.audit is not None:
                self.audit(audits)
            results.append(result)
        # Of the sampled ones, and by the training reward: that is what training climbs, and a verifier that steers
        # training is no longer held out.
        seen = results[-1].details.get("reward_mean")
        if isinstance(seen, float):
            self.trainer.observe(seen)
        return results

    async def close(self) -> None:
        await self.sampler.close()
        await self.data.rubric.close()
        if self.data.verifier is not self.data.rubric:
            await self.data.verifier.close()


async def _held_out(stage: Stage) -> HeldOut:
    data = stage.data
    return HeldOut(
        setup=stage.setup,
        tasks=data.heldout,
        verifier=data.verifier,
        verifier_name=data.verifier_name,
        constant_score=await constant_answer_score(data.verifier, data.heldout),
        error_limit=stage.config.rollout.error_limit,
    )


def resolve_objective(config: RunConfig) -> Objective:
    """The objective of a stage, with the rules that need no data."""
    if config.stage == "sft":
        return supervised_objective()
    wanted = config.objective
    objective = resolve(wanted.preset, {kind: getattr(wanted, kind) for kind in REGISTRY})
    check_objective(objective, group_size=config.rollout.group_size)
    if "teacher" in objective.needs and not config.model.teacher:
        raise UserError(f"objective {objective.name} needs a teacher. Set model.teacher to a checkpoint directory")
    sampling = config.sampling
    if objective.step is not None and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        raise UserError(
            f"objective {objective.name} bounds the change of the whole distribution, which a truncated sampler does "
            f"not show. Use sampling.top_k = 0, top_p = 1 and min_p = 0"
        )
    if "step_values" in objective.needs and config.rollout.max_turns > 1:
        raise UserError(
            f"objective {objective.name} rolls out from inside an answer, and an environment of several turns cannot "
            f"be forked. Use rollout.max_turns = 1"
        )
    return objective


def pick_device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UserError('model.device="cuda", but torch sees no GPU. Use model.device="auto" or "cpu"')
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)  # type: ignore[no-any-return]


def first_model(config: RunConfig, run_folder: Path) -> Path:
    """The directory a run starts from; a new model is made inside the run."""
    if config.model.new is None:
        return find_checkpoint(config.model.path)
    folder, unfinished = run_folder / "model", run_folder / ".tmp-model"
    if not folder.is_dir():  # made aside: a run killed here must not go on from half a model
        shutil.rmtree(unfinished, ignore_errors=True)
        make_tiny_model(unfinished, seed=config.seed, **config.model.new.model_dump())
        unfinished.rename(folder)
    return folder


def build_stage(config: RunConfig, index: int, model_folder: Path, checkpoint: Path | None = None) -> Stage:
    """Loads the model and wires trainer, sampler, data and reward of one stage; `checkpoint` is where it goes on."""
    resumed = read_checkpoint(checkpoint) if checkpoint is not None else None  # first: it verifies every part
    objective = resolve_objective(config)
    data = open_data(config, model_folder)
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    load = partial(load_model, dtype=dtype, device=device, numerics=config.engine.numerics)
    model = load(model_folder)
    trainer = LocalTrainer(
        model,
        data.tokenizer,
        objective,
        _trainer_settings(config),
        pack=partial(pack, tokens_per_microbatch=config.trainer.tokens_per_microbatch),
        shard=shard,
        others=_other_models(config, objective, model_folder, load),
    )
    if checkpoint is not None:
        trainer.load(checkpoint)
    sampler, held = make_sampler(config, data, model, model_folder)
    setup = _episode_setup(config, objective, data, sampler)
    source = _source(config, index, objective, data, trainer, setup)
    if resumed is not None:
        source.load_state(resumed["source"])
        data.rubric.load_state(resumed["rubric"])
        data.verifier.load_state(resumed["verifier"])
    return Stage(
        config=config,
        index=index,
        data=data,
        model=model,
        trainer=trainer,
        sampler=sampler,
        held=held,
        source=source,
        setup=setup,
    )


def _other_models(
    config: RunConfig, objective: Objective, model_folder: Path, load: Callable[[Path], torch.nn.Module]
) -> OtherModels:
    """Reference and critic start where the stage starts; the teacher is given."""
    teacher = critic = None
    if "teacher" in objective.needs:
        folder = find_checkpoint(config.model.teacher)
        require_same_tokenizer(model_folder, folder)
        teacher = load(folder)
    if objective.critic is not None:
        rate = config.optim.critic_learning_rate
        rate = 10 * config.optim.learning_rate if rate is None else rate
        critic = Critic(
            load(model_folder),
            _optimizer(config, rate),
            total_steps=config.steps * config.trainer.updates_per_batch,
            gradient_checkpointing=config.model.gradient_checkpointing,
        )
    reference = load(model_folder) if "reference" in objective.needs else None
    return OtherModels(reference=reference, teacher=teacher, critic=critic)


def _optimizer(config: RunConfig, learning_rate: float) -> OptimizerSettings:
    given = config.optim.model_dump(exclude={"learning_rate", "critic_learning_rate"})
    return OptimizerSettings(learning_rate=learning_rate, **given)


def _trainer_settings(config: RunConfig) -> TrainerSettings:
    return TrainerSettings(
        optimizer=_optimizer(config, config.optim.learning_rate),
        temperature=config.sampling.temperature if config.stage == "rl" else 1.0,
        total_steps=config.steps,
        gradient_checkpointing=config.model.gradient_checkpointing,
        seed=config.seed,
    )


def _episode_setup(config: RunConfig, objective: Objective, data: StageData, sampler: Sampler) -> EpisodeSetup:
    return EpisodeSetup(
        sampler=sampler,
        renderer=data.renderer,
        scorer=data.rubric,
        make_env=partial(_env_of, config),
        params=SamplingParams(
            temperature=config.sampling.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
            stop_ids=data.renderer.stop_ids,
            top_k=config.sampling.top_k,
            top_p=config.sampling.top_p,
            min_p=config.sampling.min_p,
            stop=tuple(config.sampling.stop),
            top_logprobs=objective.top_k("sampler_top_k"),
        ),
        max_turns=config.rollout.max_turns,
        episode_seconds=config.rollout.episode_seconds,
        max_episode_tokens=config.rollout.max_episode_tokens,
        seed=config.seed,
    )


def _env_of(config: RunConfig, name: str) -> Env:
    """A fresh environment: the recipe's, or the one that the task names."""
    return find_env(config.env.name or name, config.env.options)()


def _source(
    config: RunConfig, index: int, objective: Objective, data: StageData, trainer: LocalTrainer, setup: EpisodeSetup
) -> BatchSource:
    if config.stage == "sft":
        return Examples(
            data.stream,
            data.renderer,
            objective,
            batch_size=config.trainer.examples_per_step,
            max_length=data.shape.max_context,
        )
    rules = _credit_rules(config, objective, data)

    def credit(taken: Taken) -> Batch:
        return make_batch(
            taken.groups,
            rules,
            score=trainer.score,
            version=trainer.version,
            dropped=taken.dropped,
            scales=trainer.scales,
        )

    rollout = config.rollout
    buffer = Buffer(
        groups_per_step=rollout.groups_per_step,
        max_staleness=rollout.max_staleness,
        max_rounds=rollout.max_rounds,
        version=trainer.version,
    )
    drop = rollout.drop_degenerate
    settings = RollSettings(
        group_size=rollout.group_size,
        min_members=objective.min_group,
        drop_degenerate="dynamic_sampling" in objective.wants if drop is None else drop,
        error_limit=rollout.error_limit,
        step_seconds=rollout.step_seconds,
        prefix=f"stage {index}",
        extras=Extras(
            greedy="greedy" in objective.needs,
            steps=_step_split(objective) if "step_values" in objective.needs else None,
            retries=rollout.retries,
        ),
    )
    return Roller(setup, data.stream, buffer, settings, credit)


def _step_split(objective: Objective) -> StepSplit:
    settings: dict[str, Any] = dict(objective.advantage.arguments)
    return StepSplit(**settings)


def _credit_rules(config: RunConfig, objective: Objective, data: StageData) -> CreditRules:
    trains = config.objective.train_truncated
    return CreditRules(
        objective=objective,
        max_new_tokens=config.sampling.max_new_tokens,
        updates=config.trainer.updates_per_batch,
        train_truncated="overlong_filter" not in objective.wants if trains is None else trains,
        part_weights=data.rubric.weights,
        seed=config.seed,
    )
