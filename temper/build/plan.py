"""What the loop calls back: the proof of parity, the canary, the watch over a step, the facts about the system.

Owns: the plan of a stage whose parts are live (stage.py). Refuses: the order in which the loop calls (loop.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from temper import loop
from temper.build.objective import doubts_about
from temper.build.stage import Stage
from temper.build.warm import warm_up
from temper.evals import contamination, readiness
from temper.models.decoder import has_seen_routers
from temper.models.experts.routing import EXPERT_FAMILIES
from temper.models.families import experts_of
from temper.models.float8.layers import float8_layers, held_bits, published_bits
from temper.parity.budgets import Budget, DepthAndWidth, budget_of
from temper.parity.check import (
    Canary,
    FindStale,
    Sides,
    canary_prompts,
    prove_parity,
    require_agreement,
    stale_tensors,
)
from temper.parity.diagnosis import Agreement
from temper.parity.isolation import check_isolation
from temper.protocols import HoldsCopies, SharesDevice, Trainer
from temper.rewards.composite import CompositeReward
from temper.rollout.group import Extras
from temper.runs.alarms.rules import configure
from temper.runs.flops import mfu, peak_flops
from temper.runs.time_split import TRAINING, time_metrics
from temper.stages.kinds import kind_of
from temper.stages.reading.choosing import doubt_choosers
from temper.trainer.ranks.parts import is_cut
from temper.trainer.ranks.sums import rank_and_world
from temper.trainer.weights import Weights
from temper.types import Batch, TrainResult

PARITY_PROMPTS = 8


def make_plan(
    stage: Stage,
    *,
    first_step: int,
    recorders: Sequence[loop.Recorder],
    checkpoint: Callable[[int], None],
    opened: Callable[[], None] = lambda: None,
    watch: loop.Watch | None = None,
) -> loop.Plan:
    """`opened` is called when parity is proven, before the first rollout."""
    config, checks = stage.config, Checks(stage, first_step, opened)
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
        warm_up=partial(warm_up, stage, first_step),
        parity=checks.parity,
        canary=checks.look_again,
        verify=checks.verify,
        measure_system=partial(_measure_system, stage),
        watch=watch,
        runs_ahead=config.rollout.max_staleness > 0,
        paused=stage.sampler.paused if isinstance(stage.sampler, SharesDevice) else nullcontext,
    )


def _budget(stage: Stage) -> Budget:
    engine = stage.config.engine
    if engine.max_logprob_gap is not None:
        return Budget(mean_gap=engine.max_logprob_gap, max_gap=math.inf)
    dtype = str(next(stage.model.parameters()).dtype).removeprefix("torch.")
    dtype = "fp8" if engine.weights == "fp8" else dtype
    shape = stage.data.shape
    size = DepthAndWidth(num_layers=shape.num_layers, width=shape.width)
    budget = budget_of(shape.family, dtype, engine.kind, engine.numerics, size)
    return budget.at(stage.setup.params.temperature)


def _sides(stage: Stage) -> Sides:
    return Sides(
        sampler=stage.sampler,
        recompute=stage.trainer.score,
        params=stage.setup.params,
        budget=_budget(stage),
        find_stale=None if stage.sampler_model is None else _stale_finder(stage.trainer, stage.sampler_model),
        ask_stale=stage.sampler.differences if isinstance(stage.sampler, HoldsCopies) else None,
        bos_id=stage.data.tokenizer.bos_token_id,
        replays_routes=stage.config.model.replay_routes not in (False, "measure"),
        seconds=stage.config.rollout.step_seconds,
    )


def _stale_finder(trainer: Trainer, sampler_model: torch.nn.Module) -> FindStale:
    drawing = Weights(sampler_model)

    def find() -> list[str]:
        published, held = trainer.publish().tensors, drawing.publication(0).tensors
        if float8_layers(sampler_model):
            published, held = published_bits(published, sampler_model), held_bits(sampler_model, held)
        return stale_tensors(published, held)

    return find


class Checks:
    """What may refuse to start a stage or to go on with it."""

    def __init__(self, stage: Stage, first_step: int, opened: Callable[[], None]) -> None:
        self._stage, self._first_step, self._opened = stage, first_step, opened
        self._canary: Canary | None = None
        """None before parity is proven, and in stages that sample nothing."""

    async def parity(self) -> None:
        """Rows of a pack are apart, and sampler and trainer agree: both proven on this model before it is trained."""
        stage, data, listeners = self._stage, self._stage.data, self._stage.listeners
        if not is_cut(stage.model):  # of such a one it was proven before the cut
            await asyncio.to_thread(check_isolation, stage.model, data.shape.vocab_size)
        for doubt in (*doubts_about(stage.config, stage.objective), doubt_choosers(stage.config, data.stream.sources)):
            if doubt:
                listeners.warn(doubt)
        if (unwatched := _unwatched_experts(stage)) is not None:
            listeners.note(unwatched)
        if warning := await asyncio.to_thread(contamination.check, data.known, data.heldout):
            listeners.warn(warning)
        if data.heldout and data.verifier is not data.rubric:
            for name, value in (await data.verifier.start()).items():
                listeners.note(f"held-out verifier {name} = {value:g}")
        if stage.config.reward and data.is_rolling:
            for name, value in (await data.rubric.start()).items():
                listeners.note(f"reward {name} = {value:g}")
        if data.is_rolling:
            sides, name = _sides(stage), f"parity/{stage.index}/{self._first_step}"
            _, rows = await prove_parity(stage.setup, data.probe[:PARITY_PROMPTS], sides, name=name)
            self._canary = Canary(sides, canary_prompts(rows), name=f"canary/{stage.index}")
        if stage.must_be_ready and self._first_step == 1:
            await _require_ready(stage)
        self._opened()

    async def look_again(self) -> None:
        """After a publication: the canary; and as often as held-out tasks, before the step is reported, the judges."""
        stage = self._stage
        step, every = stage.trainer.version, stage.config.evaluation.every  # a version is a step
        if self._canary is not None:
            await self._canary.check(step)
        if step == stage.config.steps or (every and step % every == 0):
            for judging in _judging(stage).values():
                await judging.measure_again()

    def verify(self, step: int, result: TrainResult) -> None:
        """After every synchronous step the gap between sampled and recomputed log-probabilities stays within budget."""
        gap, config = result.metrics.get("mismatch/logp_abs_mean"), self._stage.config
        is_own = not config.rollout.max_staleness and config.trainer.updates_of_batch == 1
        if gap is None or not self._stage.data.is_rolling or not is_own:
            return
        agreement = Agreement(
            num_tokens=int(result.metrics.get("data/tokens", 0)),
            mean_gap=gap,
            # Fast mode's limit for one token is that of a few hundred; a whole batch has unluckier ones.
            max_gap=result.metrics.get("mismatch/logp_abs_max", gap) if config.engine.numerics == "exact" else gap,
        )
        require_agreement(agreement, budget=_budget(self._stage), when=f"step {step}")


def _unwatched_experts(stage: Stage) -> str | None:
    """What to know of a model whose routers are trained and told of by nobody; None: there is nothing to know."""
    config: Any = stage.model.config
    text = config.get_text_config()
    if has_seen_routers(text) or not experts_of(text.to_dict())[0] or not kind_of(stage.config).trains:
        return None
    return (
        f"experts of a {text.model_type} are not watched: no route/load_max, no route/entropy, no map of experts, and "
        f"no alarm when they collapse. Families whose experts are: {', '.join(EXPERT_FAMILIES)}"
    )


async def _require_ready(stage: Stage) -> None:
    """What supervised training has left must be fit for RL: looked at once, between the two."""
    rule = next(rule for rule in configure(stage.config.alarms) if rule.name == "readiness")
    if rule.level == "off":
        return
    rollout = stage.config.rollout
    groups = await readiness.roll(
        stage.setup,
        readiness.first_prompts(stage.data.probe, int(rule.thresholds["prompts"])),
        group_size=rollout.group_size,
        at_once=max(1, stage.config.engine.max_running // rollout.group_size),
        name=f"ready/{stage.index}",
        extras=Extras(retries=rollout.retries),
    )
    answer_of = readiness.answers_of([part.kind for part in stage.config.reward])
    found = readiness.measure(groups, answer_of=answer_of, thresholds=rule.thresholds)
    stage.listeners.show(readiness.render(found))
    for check in found.failed:
        stage.listeners.warn(f"not ready for RL: {check.name} is {check.value:.3f}; {check.advice}")
    readiness.require_ready(found, is_forced=rule.level in ("note", "warn"))


def _measure_system(stage: Stage, batch: Batch, result: TrainResult, seconds: Mapping[str, float]) -> dict[str, float]:
    lengths = [len(sample.token_ids) for update in batch.updates for sample in update]
    drawn = sum(group.tokens_drawn for group in (*batch.groups, *(group for group, _ in batch.dropped)))
    training_seconds = sum(seconds.get(name, 0.0) for name in TRAINING)
    system = {
        "sys/train_tokens": float(sum(lengths)),
        "sys/rollout_tokens": float(drawn),
        "sys/train_tok_s": sum(lengths) / max(training_seconds, 1e-9),
        "sys/peak_memory_bytes": float(stage.trainer.peak_memory_bytes()),
        "sys/peak_memory_since_start": float(stage.trainer.peak_is_since_start),
        **time_metrics(seconds, stage.pressure.read()),
        **mfu(result.model_flops, training_seconds, _peak(stage)),
        **_judge_metrics(stage),
        **batch.system,
    }
    if (num_queued := stage.source.num_queued) is not None:
        system["sys/queue_groups"] = float(num_queued)
    if "rollout" in seconds:
        # Who runs ahead draws all the time; the trainer waits for the rest of it alone.
        drawing = sum(seconds.values()) if stage.config.rollout.max_staleness else seconds["rollout"]
        system["sys/rollout_tok_s"] = drawn / max(drawing, 1e-9)
    return system


def _judging(stage: Stage) -> dict[str, CompositeReward]:
    """What may ask judges: the reward, and the held-out verifier where it is another; by prefix of their parts."""
    data = stage.data
    return {"": data.rubric} if data.verifier is data.rubric else {"": data.rubric, "heldout/": data.verifier}


def _judge_metrics(stage: Stage) -> dict[str, float]:
    """What judges said, how far they agree with people now, and for the alarm the worst fall of that."""
    found = dict[str, float]()
    for prefix, rubric in _judging(stage).items():
        found |= rubric.metrics(prefix)
    falls = [value for name, value in found.items() if name.startswith("judge/kappa_fall/")]
    return {**found, "judge/kappa_fall": max(falls)} if falls else found


def _peak(stage: Stage) -> float | None:
    """FLOP/s of the trainer's GPUs together; None on a CPU and on GPUs that are not known."""
    weights = next(stage.model.parameters())
    name = torch.cuda.get_device_name(weights.device) if weights.is_cuda else ""
    peak = peak_flops(name, str(weights.dtype))
    return None if peak is None else peak * rank_and_world()[1]
