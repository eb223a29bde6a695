"""One fault at a time in a real engine and a real trainer: the gate refuses and its diagnosis names the fault."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from temper.batching.pack import pack
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.errors import BackendError
from temper.models.load import prepare
from temper.models.states import Head
from temper.objectives import PRESETS
from temper.parity.budgets import EXACT, Budget
from temper.parity.check import Canary, Sides, canary_prompts, require_agreement, stale_tensors
from temper.parity.diagnosis import Agreement, measure
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.weights import publish
from temper.types import Column, Completion, Finish, Publication, Request, Sample, SamplingParams

BUDGET = Budget(mean_gap=1e-5, max_gap=1e-3)
VOCABULARY = 97
BOS = 96


def make_model(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "initializer_range": 0.2, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, **changes,
        }
    )  # fmt: skip
    return prepare(AutoModelForCausalLM.from_config(config).eval())


def make_engine(model: Any) -> LocalEngine:
    settings = EngineSettings(
        seed=7, block_size=4, num_blocks=200, max_running=16, tokens_per_step=64, max_length=128
    )  # fmt: skip
    return LocalEngine(model, settings)


def make_trainer(model: Any, temperature: float = 1.0) -> LocalTrainer:
    settings = TrainerSettings(
        optimizer=OptimizerSettings(learning_rate=1e-3), temperature=temperature, total_steps=1
    )  # fmt: skip
    return LocalTrainer(model, None, PRESETS["grpo"], settings, pack=partial(pack, tokens_per_microbatch=512))


def prompts() -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randrange(2, BOS) for _ in range(size)) for size in (21, 17, 30, 12)]


class Between:
    """A sampler that asks the engine for something else, or answers something else, than it was asked."""

    def __init__(
        self,
        engine: LocalEngine,
        ask: Callable[[Request], Request] = lambda request: request,
        answer: Callable[[Request, Completion], Completion] = lambda _, completion: completion,
    ) -> None:
        self._engine, self._ask, self._answer = engine, ask, answer

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, request: Request) -> Completion:
        drawn = await self._engine.generate(self._ask(request))
        # The fault is silent: the sampler claims to have done what was asked.
        honest = dataclasses.replace(drawn, prompt_ids=request.prompt_ids, params=request.params)
        return self._answer(request, honest)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def interrupt(self, request_id: str) -> None:
        raise NotImplementedError

    async def load(self, publication: Publication) -> None:
        await self._engine.load(publication)

    def stats(self) -> Mapping[str, float]:
        return self._engine.stats()

    async def close(self) -> None:
        await self._engine.close()


class Truncating(Between):
    """Draws from the most likely tokens that hold `top_p`, one token at a time, and renormalises or does not."""

    def __init__(self, engine: LocalEngine, top_p: float) -> None:
        super().__init__(engine)
        self._top_p = top_p

    async def generate(self, request: Request) -> Completion:
        draw, tokens, logprobs = random.Random(request.id), [], []
        for place in range(request.params.max_new_tokens):
            params = dataclasses.replace(request.params, max_new_tokens=1, top_logprobs=VOCABULARY)
            prompt = (*request.prompt_ids, *tokens)
            one = await self._engine.generate(Request(id=f"{request.id}/{place}", prompt_ids=prompt, params=params))
            assert one.top_ids is not None
            assert one.top_logprobs is not None
            kept = renormalised(one.top_ids[0], one.top_logprobs[0], self._top_p)
            tokens += draw.choices(list(kept), [math.exp(logprob) for logprob in kept.values()])
            logprobs.append(kept[tokens[-1]])
        count = request.params.top_logprobs
        return Completion(
            prompt_ids=request.prompt_ids, token_ids=tokens, logprobs=logprobs,
            versions=[self.version] * len(tokens), finish=Finish.LENGTH, params=request.params,
            top_ids=[list(kept)[:count]] * len(tokens) if count else None,
            top_logprobs=[list(kept.values())[:count]] * len(tokens) if count else None,
        )  # fmt: skip


def renormalised(ids: Sequence[int], logprobs: Sequence[float], top_p: float) -> dict[int, float]:
    kept, mass = {}, 0.0
    for token, logprob in zip(ids, logprobs, strict=True):
        if mass >= top_p:
            break
        kept[token] = logprob
        mass += math.exp(logprob)
    return {token: logprob - math.log(mass) for token, logprob in kept.items()}


def check(sampler: Any, trainer: Any, held: Any = None, **changes: Any) -> Agreement:
    """One canary of the given pair; `held` is the sampler's model when its weights may be looked at."""
    score = trainer.score if isinstance(trainer, LocalTrainer) else trainer
    sides = Sides(
        sampler=sampler, recompute=score, params=changes.pop("params", SamplingParams()), budget=BUDGET, bos_id=BOS,
        find_stale=None if held is None else lambda: stale_tensors(trainer.publish().tensors, publish(held, 0).tensors),
    )  # fmt: skip
    canary = Canary(dataclasses.replace(sides, **changes), prompts(), name="canary")
    agreement = asyncio.run(canary.check(sampler.version))
    assert agreement is not None
    return agreement


def test_a_sound_pair_agrees_and_costs_no_experiment() -> None:
    model = make_model()
    agreement = check(make_engine(model), make_trainer(model), held=model)
    assert agreement.num_tokens == 4 * 8
    assert agreement.mean_gap < BUDGET.mean_gap
    assert agreement.stale == ()
    assert agreement.evidence is None


def test_a_check_that_passes_costs_the_trainer_one_pass() -> None:
    model = make_model()
    trainer = make_trainer(model)
    passes: list[int] = []

    def counted(samples: Sequence[Sample], who: Any) -> list[list[float]]:
        passes.append(len(samples))
        return trainer.score(samples, who)

    check(make_engine(model), counted)
    assert passes == [4]


@pytest.mark.parametrize(("sampled", "trained"), [(1.3, 1.0), (1.0, 0.7), (0.7, 0.5)])
def test_a_wrong_temperature_on_either_side_is_named_with_both_candidates(sampled: float, trained: float) -> None:
    model = make_model()
    asked = 0.7 if sampled == 0.7 else 1.0  # the last case: the sampler does as asked, and neither is 1
    sampler = Between(
        make_engine(model),
        ask=lambda request: dataclasses.replace(
            request, params=dataclasses.replace(request.params, temperature=sampled)
        ),
    )
    with pytest.raises(BackendError, match="a temperature") as error:
        check(sampler, make_trainer(model, trained), params=SamplingParams(temperature=asked))
    assert f"{asked * sampled / trained:.3g}" in str(error.value)
    assert f"{asked / (sampled / trained):.3g}" in str(error.value)


def test_one_stale_tensor_is_named() -> None:
    model = make_model()
    held = copy.deepcopy(model)
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        dict(held.named_parameters())[name][3, 5] += 0.5
    with pytest.raises(BackendError, match=f"stale tensor, {name}"):
        check(make_engine(held), make_trainer(model), held=held)


def test_a_stale_tensor_is_refused_even_when_the_gap_hides_it() -> None:
    model = make_model()
    held = copy.deepcopy(model)
    with torch.no_grad():
        held.model.norm.weight[0] += 1e-7
    assert check(make_engine(held), make_trainer(model)).mean_gap < BUDGET.mean_gap
    with pytest.raises(BackendError, match=r"stale tensor, model\.norm\.weight"):
        check(make_engine(held), make_trainer(model), held=held)


def test_scrambled_weights_are_named_with_their_number() -> None:
    model, held = make_model(), make_model(seed=1)
    count = sum(not name.endswith("norm.weight") for name, _ in model.named_parameters())
    with pytest.raises(BackendError, match=f"other weights than the trainer, {count} tensors"):
        check(make_engine(held), make_trainer(model), held=held)


def test_weights_that_cannot_be_looked_at_are_an_honest_no_single_cause() -> None:
    with pytest.raises(BackendError, match=r"No single cause.*weights were not compared"):
        check(make_engine(make_model(seed=1)), make_trainer(make_model()))


def test_a_stale_copy_of_the_head_is_told_from_stale_weights() -> None:
    model = make_model()
    engine = make_engine(model)
    engine._runner._head = Head.of(make_model(seed=1))
    with pytest.raises(BackendError, match=r"No single cause.*all weights are equal: look at copies"):
        check(engine, make_trainer(model), held=model)


@pytest.mark.parametrize("side", ["sampler", "trainer"])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_a_head_in_half_precision_on_one_side_is_named(
    side: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    engine, trainer = make_engine(model), make_trainer(model, temperature)
    plain = Head.logits

    def rounded(self: Head, hidden: torch.Tensor) -> torch.Tensor:
        is_engine = torch.is_inference_mode_enabled()
        logits = plain(self, hidden)
        return logits.bfloat16().float() if is_engine == (side == "sampler") else logits

    monkeypatch.setattr(Head, "logits", rounded)
    with pytest.raises(BackendError, match=f"head of the {side} rounds to half precision"):
        check(engine, trainer, held=model, params=SamplingParams(temperature=temperature))


def test_lost_sequence_boundaries_are_named() -> None:
    model = make_model()
    model.config.max_position_embeddings = 10_000  # rows taken for one are a long one
    trainer = make_trainer(model)

    def leaking(samples: Sequence[Sample], who: Any) -> list[list[float]]:
        """Scores all rows as one long one."""
        joined = {
            field.name: [entry for sample in samples for entry in getattr(sample, field.name)]
            for field in dataclasses.fields(Sample)
            if isinstance(getattr(samples[0], field.name), Column)
        }
        (row,) = trainer.score([dataclasses.replace(samples[0], **joined)], who)
        ends = [sum(len(s.token_ids) for s in samples[: k + 1]) for k in range(len(samples))]
        return [row[end - len(sample.token_ids) : end] for end, sample in zip(ends, samples, strict=True)]

    with pytest.raises(BackendError, match="loses sequence boundaries"):
        check(make_engine(model), leaking)


@pytest.mark.parametrize("fault", ["extra BOS", "first token twice", "first token lost"])
def test_prompts_that_the_sampler_changes_in_secret_are_named(fault: str) -> None:
    model = make_model()
    change = {
        "extra BOS": lambda ids: (BOS, *ids),
        "first token twice": lambda ids: (ids[0], *ids),
        "first token lost": lambda ids: ids[1:] or ids,
    }[fault]
    sampler = Between(
        make_engine(model), ask=lambda request: dataclasses.replace(request, prompt_ids=change(request.prompt_ids))
    )
    words = {"extra BOS": f"with a BOS .id {BOS}. in front", "first token twice": "with their first token twice"}
    with pytest.raises(BackendError, match=f"other prompts.*{words.get(fault, 'without their first token')}"):
        check(sampler, make_trainer(model))


def test_a_truncation_that_the_trainer_was_not_told_of_is_named_with_the_kept_mass() -> None:
    model = make_model()
    with pytest.raises(BackendError, match=r"sampler normalises over about 8\d% .*generation_config"):
        check(Truncating(make_engine(model), top_p=0.8), make_trainer(model))


def test_logprobs_that_are_not_renormalised_are_named() -> None:
    """The trainer renormalises over the same tokens; the sampler forgot to."""
    model = make_model()
    trainer = make_trainer(model)

    def within_keep_set(samples: Sequence[Sample], who: Any) -> list[list[float]]:
        masses = {sample.token_ids[0]: 0.7 + 0.002 * sample.token_ids[0] for sample in samples}
        return [
            [value - math.log(masses[sample.token_ids[0]]) * drawn for value, drawn in zip(row, mask, strict=True)]
            for sample, row in zip(samples, trainer.score(samples, who), strict=True)
            for mask in [sample.loss_mask]
        ]

    with pytest.raises(BackendError, match=r"not renormalised after top_p"):
        check(make_engine(model), within_keep_set)


def test_other_rotary_positions_are_named() -> None:
    model, held = (
        make_model(),
        make_model(rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    )
    held.load_state_dict(model.state_dict())
    with pytest.raises(BackendError, match=r"positions differ.*rotary"):
        check(make_engine(held), make_trainer(model), held=held)


def test_a_number_that_is_none_is_named() -> None:
    model = make_model()
    trainer = make_trainer(model)

    def broken(samples: Sequence[Sample], who: Any) -> list[list[float]]:
        rows = [list(row) for row in trainer.score(samples, who)]
        rows[-1][-1] = math.nan
        return rows

    with pytest.raises(BackendError, match="not finite numbers"):
        check(make_engine(model), broken)


def test_two_faults_at_once_are_no_single_cause() -> None:
    model = make_model()
    sampler = Between(
        make_engine(model),
        ask=lambda request: dataclasses.replace(
            request,
            prompt_ids=(BOS, *request.prompt_ids),
            params=dataclasses.replace(request.params, temperature=1.4),
        ),
    )
    with pytest.raises(BackendError, match="No single cause"):
        check(sampler, make_trainer(model))


def test_rounding_alone_is_called_rounding_and_fails_the_exact_budget() -> None:
    model = make_model()
    trainer = make_trainer(model)

    def nudged(samples: Sequence[Sample], who: Any) -> list[list[float]]:
        return [[value * (1 + 1e-7) for value in row] for row in trainer.score(samples, who)]

    check(make_engine(model), nudged)
    with pytest.raises(BackendError, match="This is rounding"):
        check(make_engine(model), nudged, budget=EXACT)


def test_parameters_that_the_sampler_admits_to_have_changed_are_refused_by_name() -> None:
    model = make_model()

    def confess(request: Request, completion: Completion) -> Completion:
        return dataclasses.replace(completion, params=dataclasses.replace(request.params, top_p=0.9))

    with pytest.raises(BackendError, match=r"top_p 0\.9 instead of 1"):
        check(Between(make_engine(model), answer=confess), make_trainer(model))


def test_tokens_of_another_version_are_not_compared() -> None:
    rows = [
        Sample(
            group_id="g", index=0, token_ids=[1, 2, 3], loss_mask=[0, 1, 1], behavior_logprobs=[0.0, -1.0, -2.0],
            versions=[-1, 4, 5], advantages=[0.0] * 3, weights=[0.0] * 3,
        )
    ]  # fmt: skip
    agreement = measure(rows, [[99.0, -9.0, -2.5]], version=5)
    assert (agreement.num_tokens, agreement.mean_gap) == (1, 0.5)
    assert measure(rows, [[99.0, -9.0, -2.5]]).mean_gap == pytest.approx(4.25)
    with pytest.raises(BackendError, match=r"wanted those of version 6, drawn were \[4, 5\]"):
        measure(rows, [[0.0, 0.0, 0.0]], version=6)


def test_an_unexplained_gap_of_a_step_says_how_to_find_out() -> None:
    step = Agreement(num_tokens=100, mean_gap=0.5, max_gap=2.0)
    with pytest.raises(BackendError, match=r"engine\.canary_every=1"):
        require_agreement(step, budget=BUDGET, when="step 3")
    require_agreement(dataclasses.replace(step, mean_gap=1e-6, max_gap=1e-5), budget=BUDGET, when="step 3")
    with pytest.raises(BackendError):
        require_agreement(dataclasses.replace(step, mean_gap=1e-6), budget=BUDGET, when="one bad token of many")


def test_canary_prompts_are_few_short_and_no_start_of_a_training_prompt() -> None:
    def row(prompt: list[int]) -> Sample:
        length = len(prompt) + 1
        return Sample(
            group_id="g", index=0, token_ids=[*prompt, 9], loss_mask=[0] * len(prompt) + [1],
            behavior_logprobs=[0.0] * length, versions=[0] * length, advantages=[0.0] * length, weights=[0.0] * length,
        )  # fmt: skip

    rows = [row([5]), row(list(range(10, 90))), row([7, 8]), row([7, 8]), row(list(range(10, 100)))]
    assert canary_prompts(rows) == [(5,), (8,), tuple(range(26, 90)), tuple(range(36, 100))]


def test_one_unlucky_token_is_looked_at_again_and_many_stop_the_run() -> None:
    model = make_model()
    trainer, engine = make_trainer(model), make_engine(model)
    unlucky = 40 * BUDGET.mean_gap
    calls = 0

    def once(samples: Sequence[Sample], who: Any) -> list[list[float]]:
        nonlocal calls
        calls += 1
        scores = [list(row) for row in trainer.score(samples, who)]
        scores[0][-1] += unlucky  # more than its share of the mean of 32 tokens, not of 512
        return scores

    agreement = check(engine, once)
    assert calls == 2
    assert agreement.num_tokens == 16 * 4 * 8

    def always(samples: Sequence[Sample], who: Any) -> list[list[float]]:
        return [[score + 2 * BUDGET.mean_gap for score in row] for row in trainer.score(samples, who)]

    with pytest.raises(BackendError, match="sampler and trainer disagree"):
        check(make_engine(model), always)


def test_texts_behind_a_stop_token_stop_no_run() -> None:
    """A first look goes on behind answers, so that all looks have as many tokens; nobody trains on that."""
    model = make_model()
    trainer, stops = make_trainer(model), frozenset(range(0, BOS, 2))

    def beyond(samples: Sequence[Sample], who: Any) -> list[list[float]]:
        """The trainer's scores, far off behind the first stop token of each row."""
        scores = [list(row) for row in trainer.score(samples, who)]
        for sample, row in zip(samples, scores, strict=True):
            first = sample.loss_mask.index(1)
            ends = [place for place in range(first, len(row)) if sample.token_ids[place] in stops]
            for place in range(ends[0] + 1 if ends else len(row), len(row)):
                row[place] += 40 * BUDGET.mean_gap
        return scores

    params = SamplingParams(stop_ids=tuple(stops))
    agreement = check(make_engine(model), beyond, params=params)
    assert agreement.num_tokens < 16 * 4 * 8  # looked at again, up to the stop tokens
    with pytest.raises(BackendError, match="sampler and trainer disagree"):
        check(make_engine(model), beyond)  # without stop tokens these are texts as all others
