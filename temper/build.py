"""From a configuration to objects: one stage, ready for the loop. The only file that may import everything.

Owns: which parts are made and how they are wired. Refuses: training (loop.py) and checking data (data.py).
"""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from temper import loop
from temper.batching.pack import pack, shard
from temper.batching.samples import CreditRules, make_batch
from temper.config import RunConfig
from temper.data import StageData, open_data
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.envs.env import find_env
from temper.errors import UserError
from temper.evals.evaluate import Evaluation, constant_answer_score, evaluate
from temper.models.load import find_checkpoint, load_model, require_same_tokenizer
from temper.models.tiny import make_tiny_model
from temper.objectives import Objective, check_objective, resolve
from temper.objectives.resolve import REGISTRY
from temper.protocols import BatchSource, Env
from temper.rollout.buffer import Buffer, Taken
from temper.rollout.episode import EpisodeSetup
from temper.rollout.gate import BUDGETS, Agreement, check_before_training, require_agreement
from temper.rollout.group import Extras
from temper.rollout.roller import Roller, RollSettings
from temper.rollout.steps import StepSplit
from temper.stages.sft import Examples, supervised_objective
from temper.trainer.checkpoint import read_checkpoint
from temper.trainer.critic import Critic
from temper.trainer.isolation import check_isolation
from temper.trainer.optim import OptimizerSettings
from temper.trainer.trainer import LocalTrainer, OtherModels, TrainerSettings
from temper.types import Batch, EvaluationResult, SamplingParams, TrainResult, total_tokens

GATE_PROMPTS = 8


@dataclass(kw_only=True)
class Stage:
    """The live parts of one stage."""

    config: RunConfig
    index: int
    data: StageData
    model: torch.nn.Module
    trainer: LocalTrainer
    sampler: LocalEngine
    source: BatchSource
    setup: EpisodeSetup
    note: Callable[[str], None] = print
    """Where facts about the run go: the store's events."""
    constant_score: float | None = None

    async def evaluate(self, step: int) -> list[EvaluationResult]:
        """Greedy and sampled held-out scores of the weights the sampler holds."""
        tasks = self.data.heldout
        if self.constant_score is None:
            self.constant_score = await constant_answer_score(self.setup, tasks)
        ways = (
            Evaluation(name="greedy", temperature=0.0, samples=1),
            Evaluation(
                name="sampled", temperature=self.config.sampling.temperature, samples=self.config.evaluation.samples
            ),
        )
        score = partial(evaluate, stage=self.index, step=step, constant_score=self.constant_score)
        results = [await score(self.setup, tasks, way) for way in ways]
        self.trainer.observe(results[-1].score)  # the sampled one: what training climbs
        return results

    async def close(self) -> None:
        await self.sampler.close()
        await self.data.rubric.close()


def resolve_objective(config: RunConfig) -> Objective:
    """The objective of a stage, with the rules that need no data."""
    if config.stage == "sft":
        return supervised_objective()
    wanted = config.objective
    objective = resolve(wanted.preset, {kind: getattr(wanted, kind) for kind in REGISTRY})
    check_objective(objective, group_size=config.rollout.group_size)
    if "teacher" in objective.needs and not config.model.teacher:
        raise UserError(f"objective {objective.name} needs a teacher. Set model.teacher to a checkpoint directory")
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
    model = load_model(model_folder, dtype, device)
    trainer = LocalTrainer(
        model,
        data.tokenizer,
        objective,
        _trainer_settings(config),
        pack=partial(pack, tokens_per_microbatch=config.trainer.tokens_per_microbatch),
        shard=shard,
        others=_other_models(config, objective, model_folder, partial(load_model, dtype=dtype, device=device)),
    )
    if checkpoint is not None:
        trainer.load(checkpoint)
    # One copy of the weights when nothing is sampled while they change; otherwise the engine needs its own.
    is_synchronous = config.rollout.max_staleness == 0 or config.stage == "sft"
    sampler = LocalEngine(model if is_synchronous else copy.deepcopy(model), _engine_settings(config, data))
    setup = _episode_setup(config, objective, data, sampler)
    source = _source(config, index, objective, data, trainer, setup)
    if resumed is not None:
        source.load_state(resumed["source"])
        data.rubric.load_state(resumed["rubric"])
    return Stage(
        config=config,
        index=index,
        data=data,
        model=model,
        trainer=trainer,
        sampler=sampler,
        source=source,
        setup=setup,
    )


def make_plan(
    stage: Stage, *, first_step: int, recorders: Sequence[loop.Recorder], checkpoint: Callable[[int], None]
) -> loop.Plan:
    config = stage.config
    return loop.Plan(
        stage=stage.index,
        steps=config.steps,
        first_step=first_step,
        source=stage.source,
        trainer=stage.trainer,
        sampler=stage.sampler,
        recorders=tuple(recorders),
        evaluate=stage.evaluate if stage.data.heldout else None,
        evaluate_every=config.evaluation.every,
        checkpoint=checkpoint,
        checkpoint_every=config.checkpoint.every,
        gate=partial(_gate, stage, first_step),
        verify=partial(_verify, stage),
        measure_system=partial(_measure_system, stage),
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


def _engine_settings(config: RunConfig, data: StageData) -> EngineSettings:
    engine = config.engine
    longest = data.longest_prompt + config.sampling.max_new_tokens
    # A quarter more than the probed prompts need: a longer one than those is preempted, never refused.
    tokens = engine.kv_tokens or max(engine.max_running * longest * 5 // 4, data.shape.max_context)
    return EngineSettings(
        seed=config.seed,
        block_size=engine.block_size,
        num_blocks=-(-tokens // engine.block_size) + engine.max_running + 2,
        max_running=engine.max_running,
        tokens_per_step=max(engine.tokens_per_step, engine.max_running + 1),
        max_length=data.shape.max_context,
        cuda_graphs=engine.cuda_graphs,
    )


def _episode_setup(config: RunConfig, objective: Objective, data: StageData, sampler: LocalEngine) -> EpisodeSetup:
    return EpisodeSetup(
        sampler=sampler,
        renderer=data.renderer,
        scorer=data.rubric,
        make_env=partial(_env_of, config),
        params=SamplingParams(
            temperature=config.sampling.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
            stop_ids=data.renderer.stop_ids,
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


def _budget(stage: Stage) -> float:
    given = stage.config.engine.max_logprob_gap
    dtype = str(next(stage.model.parameters()).dtype).removeprefix("torch.")
    return BUDGETS[dtype] if given is None else given


async def _gate(stage: Stage, first_step: int) -> None:
    """Rows of a pack are apart, and sampler and trainer agree: both proven on this model before it is trained."""
    await asyncio.to_thread(check_isolation, stage.model, stage.data.shape.vocab_size)
    if stage.config.stage == "rl":
        for name, value in (await stage.data.rubric.start()).items():
            stage.note(f"reward {name} = {value:g}")
        await check_before_training(
            stage.setup,
            stage.data.probe[:GATE_PROMPTS],
            stage.trainer.score,
            budget=_budget(stage),
            name=f"gate/{stage.index}/{first_step}",
        )


def _verify(stage: Stage, step: int, result: TrainResult) -> None:
    """After every synchronous step the gap between sampled and recomputed log-probabilities stays within budget."""
    gap = result.metrics.get("mismatch/logp_abs_mean")
    config = stage.config
    if gap is None or config.stage == "sft" or config.rollout.max_staleness or config.trainer.updates_per_batch > 1:
        return
    agreement = Agreement(
        num_tokens=int(result.metrics.get("data/tokens", 0)),
        mean_gap=gap,
        max_gap=result.metrics.get("mismatch/logp_abs_max", gap),
        first_token_gap=0.0,
        slope=1.0,
    )
    require_agreement(agreement, budget=_budget(stage), when=f"step {step}")


def _measure_system(stage: Stage, batch: Batch, seconds: Mapping[str, float]) -> dict[str, float]:
    stats = stage.sampler.stats()
    trained = sum(total_tokens(update) for update in batch.updates)
    drawn = sum(group.tokens_drawn for group in (*batch.groups, *(group for group, _ in batch.dropped)))
    training_seconds = sum(seconds.get(name, 0.0) for name in ("proximal", "forward_backward", "optimizer"))
    system = {
        "sys/train_tokens": float(trained),
        "sys/rollout_tokens": float(drawn),
        "sys/train_tok_s": trained / max(training_seconds, 1e-9),
        "sys/peak_memory_bytes": float(stage.trainer.peak_memory_bytes()),
        "sys/kv_use": stats["kv_use"],
        "sys/preemptions": stats["preemptions"],
        **stage.data.rubric.metrics(),
    }
    if "rollout" in seconds:
        system["sys/rollout_tok_s"] = drawn / max(seconds["rollout"], 1e-9)
    return system
