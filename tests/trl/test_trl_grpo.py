"""The same batch through TRL's trainers and through Temper: advantages, loss, gradient and metrics agree.

TRL runs its own scoring and loss code on an object made without its constructor; only generation, the forward pass and
the rewards are replaced, by random numbers in float64. Completions hold observations (TRL's tool mask).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from temper.objectives import (
    Credit,
    Extent,
    Objective,
    Tokens,
    advantages_of,
    measure_batch,
    objective_loss,
    resolve,
)

pytest.importorskip("trl")
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer

GROUP_SIZE, NUM_GROUPS, MAX_NEW_TOKENS = 4, 3, 9
TOLERANCE = 1e-7
"""Everything is float64 but G / (G - 1) in TRL's standard deviation, which is float32."""
EPS = 1e-4
"""TRL's, in the denominator of group-normalised advantages; Temper's default is 1e-6."""
ADVANTAGE = {"name": "group_mean_std", "eps": EPS}


@dataclass(frozen=True)
class Batch:
    """All [B, L], padded on the right."""

    policy: Tensor
    proximal: Tensor
    behavior: Tensor
    reference: Tensor
    entropy: Tensor
    is_response: Tensor
    is_drawn: Tensor
    rewards: Tensor
    """[B]"""


def random_batch(seed: int = 0, *, has_observations: bool = True) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    shape = (GROUP_SIZE * NUM_GROUPS, MAX_NEW_TOKENS)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=draw, dtype=torch.float64)

    lengths_B = torch.randint(3, MAX_NEW_TOKENS + 1, shape[:1], generator=draw)
    is_response = torch.arange(MAX_NEW_TOKENS) < lengths_B[:, None]
    is_observed = torch.rand(shape, generator=draw) < 0.2
    is_observed[:, 0] = False
    proximal = -normal(1.0).exp()
    return Batch(
        policy=(proximal + normal(0.3)).requires_grad_(),
        proximal=proximal,
        # TRL reads the sampler's numbers as float32, so they are made exact in it; the same for entropy quantiles.
        behavior=(proximal + normal(0.3)).float().double(),
        reference=proximal + normal(0.3),
        entropy=normal(1.0).abs().float().double().requires_grad_(),
        is_response=is_response,
        is_drawn=is_response & ~is_observed if has_observations else is_response,
        rewards=torch.randint(0, 4, shape[:1], generator=draw).double(),
    )


class Fakes:
    """What a trainer would compute with a model. Mixed into TRL's trainers."""

    batch: Batch
    ref_model = "reference"

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, None]:
        if model == "reference":
            return self.batch.reference, None, None
        if kwargs.get("compute_entropy"):
            return self.batch.policy, self.batch.entropy, None
        return self.batch.proximal, None, None

    def _calculate_rewards(self, *args: Any) -> Tensor:
        return self.batch.rewards[:, None]

    def _sequences(self) -> tuple[list[list[int]], list[list[int]]]:
        lengths_B = self.batch.is_response.sum(1).tolist()
        return [[1, 2] for _ in lengths_B], [[3] * length for length in lengths_B]


class BareGRPO(Fakes, GRPOTrainer):
    def __init__(self) -> None:
        pass

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, completion_ids = self._sequences()
        lengths = [len(ids) for ids in completion_ids]
        tool_mask = [row[:length] for row, length in zip(self.batch.is_drawn.long().tolist(), lengths, strict=True)]
        logprobs = [row[:length] for row, length in zip(self.batch.behavior.tolist(), lengths, strict=True)]
        return prompt_ids, completion_ids, tool_mask, [""] * len(prompts), logprobs, {}, None, []


class BareGMPO(BareGRPO, GMPOTrainer):
    pass


class BareRLOO(Fakes, RLOOTrainer):
    def __init__(self) -> None:
        pass

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, completion_ids = self._sequences()
        return prompt_ids, completion_ids, [""] * len(prompts)


SETTINGS: dict[str, Any] = {
    "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
    "scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize", "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None, "num_generations": GROUP_SIZE, "max_completion_length": MAX_NEW_TOKENS,
    "use_vllm": False, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 3.0, "num_iterations": 2,
    "mask_truncated_completions": False, "_entropy_bonus_enabled": False, "use_adaptive_entropy": False,
    "entropy_coef": 0.0, "aux_loss_enabled": False, "current_gradient_accumulation_steps": 1, "tools": [],
    "environments": None, "environment_factories": None, "pad_to_multiple_of": None, "reward_func_names": ["reward"],
    "log_multimodal": False, "reward_clip_range": None, "normalize_advantages": False,
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    # Two updates per batch: TRL then keeps log-probabilities from before the first, as Temper always does.
    "steps_per_generation": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 99,
    "gradient_checkpointing_kwargs": None, "report_to": [],
}  # fmt: skip


def one_process() -> SimpleNamespace:
    def same(value: Tensor, **kwargs: Any) -> Tensor:
        return value

    return SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, process_index=0, is_main_process=True, sync_gradients=True,
        gather=same, reduce=same, gather_for_metrics=same, pad_across_processes=same,
    )  # fmt: skip


def bare(kind: type[Any], batch: Batch, settings: dict[str, Any]) -> Any:
    trainer = kind()
    model = nn.Module()
    model.is_gradient_checkpointing = False  # type: ignore[assignment]
    own = {name: value for name, value in settings.items() if name not in ARGUMENTS}
    for name, value in (SETTINGS | own).items():
        setattr(trainer, name, value)
    trainer.args = SimpleNamespace(**ARGUMENTS | {name: settings[name] for name in settings if name in ARGUMENTS})
    trainer.batch, trainer.model, trainer.accelerator = batch, model, one_process()
    trainer._tokenizer, trainer.state = SimpleNamespace(pad_token_id=0), SimpleNamespace(global_step=0)
    trainer.reward_weights = torch.ones(1, dtype=torch.float64)
    trainer._metrics = {"train": defaultdict(list)}
    trainer._logs = {"prompt": [], "completion": [], "rewards": defaultdict(list), "advantages": [], "extra": {}}
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    return trainer


@dataclass(frozen=True)
class Outcome:
    advantages: Tensor
    """[B]"""
    loss: Tensor
    gradients: tuple[Tensor, Tensor]
    """By the policy's log-probabilities and by entropy."""
    metrics: dict[str, float]


def by_trl(kind: type[Any], batch: Batch, settings: dict[str, Any]) -> Outcome:
    trainer = bare(kind, batch, settings)
    inputs = trainer._generate_and_score_completions([{"prompt": "?"} for _ in batch.rewards])
    loss = trainer._compute_loss(trainer.model, inputs)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return Outcome(inputs["advantages"], loss.detach(), gradients(loss, batch), metrics)


def by_temper(objective: Objective, batch: Batch) -> Outcome:
    lengths_B = batch.is_drawn.sum(1)
    group_ids_B = torch.arange(NUM_GROUPS).repeat_interleave(GROUP_SIZE)
    at = batch.is_drawn

    credit = Credit(
        rewards=batch.rewards,
        group_ids=group_ids_B,
        lengths=lengths_B,
        is_truncated=torch.zeros(len(lengths_B), dtype=torch.bool),
        max_new_tokens=MAX_NEW_TOKENS,
        proximal_logprobs=batch.proximal[at],
        reference_logprobs=batch.reference[at],
    )
    advantages_N = advantages_of(objective, credit).tokens
    extent = Extent(lengths=lengths_B, group_ids=group_ids_B, max_new_tokens=MAX_NEW_TOKENS)
    tokens = Tokens(
        policy_logprobs=batch.policy[at],
        proximal_logprobs=batch.proximal[at],
        behavior_logprobs=batch.behavior[at],
        reference_logprobs=batch.reference[at],
        advantages=advantages_N,
        weights=objective.weighting(extent).repeat_interleave(lengths_B),
        trajectory_ids=torch.arange(len(lengths_B)).repeat_interleave(lengths_B),
        num_trajectories=len(lengths_B),
        num_batch_tokens=int(at.sum()),
        versions=torch.zeros(int(at.sum()), dtype=torch.int64),
        entropy=batch.entropy[at],
    )
    tokens = dataclasses.replace(tokens, measured=measure_batch(objective, tokens))
    loss, metrics = objective_loss(objective, tokens)
    first_N = lengths_B.cumsum(0) - lengths_B
    return Outcome(advantages_N[first_N], loss.detach(), gradients(loss, batch), metrics.finish())


def gradients(loss: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    given = torch.autograd.grad(loss, (batch.policy, batch.entropy), allow_unused=True)
    first, second = (torch.zeros_like(batch.policy) if gradient is None else gradient for gradient in given)
    return first, second


def differences(left: Outcome, right: Outcome) -> dict[str, float]:
    """Largest absolute difference, by what differs."""
    return {
        "advantages": (left.advantages - right.advantages).abs().max().item(),
        "loss": (left.loss - right.loss).abs().item(),
        "policy gradient": (left.gradients[0] - right.gradients[0]).abs().max().item(),
        "entropy gradient": (left.gradients[1] - right.gradients[1]).abs().max().item(),
    }


def agree(left: Outcome, right: Outcome) -> bool:
    return max(differences(left, right).values()) < TOLERANCE


TOKEN_MEAN, SEQUENCE_SUM = {"weighting": "token_mean"}, {"weighting": "sequence_sum"}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
VLLM = {"use_vllm": True}

CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    # name: (TRL's settings, Temper's preset, what is changed in it)
    "grpo": ({}, "grpo", {}),
    "bnpo": ({"loss_type": "bnpo"}, "grpo", TOKEN_MEAN),  # one microbatch: TRL's local mean is the global one
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, "dr_grpo", {"advantage": "group_mean"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, "dapo", {}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", {}),
    "cispo_capped": ({"loss_type": "cispo", "epsilon_high": 1.1}, "cispo", {"gate": {"cap": 1.1}}),
    "sapo": ({"loss_type": "sapo"}, "grpo", {"gate": "sapo"}),
    "gspo": (SEQUENCE, "gspo", {}),
    # TRL 1.16 has no token-wise form of it; with one advantage per trajectory its gradient is the same.
    "gspo_token": (SEQUENCE, "gspo", {"ratio": "sequence_geometric_token"}),
    "luspo": (SEQUENCE | {"loss_type": "luspo"}, "gspo", SEQUENCE_SUM),
    # TRL's ratio is against pi_old here; Temper's default for VESPO is the sampler (the next case).
    "vespo": ({"loss_type": "vespo"}, "grpo", TOKEN_MEAN | {"gate": "vespo", "ratio": "sequence_product"}),
    "vespo_against_the_sampler": (
        # TRL would truncate the factors of the product.
        VLLM | {"loss_type": "vespo", "vllm_importance_sampling_clip_max": 1e9},
        "grpo",
        TOKEN_MEAN | {"gate": "vespo", "ratio": "sequence_product", "proximal": "behavior"},
    ),
    "two_sided_delta": ({"delta": 1.3}, "grpo", {"gate": {"dual": 1.3}}),
    "kl_k3": ({"beta": 0.3}, "grpo", {"regularizers": [{"name": "kl", "coefficient": 0.3, "estimator": "k3"}]}),
    "kl_k3_is": (
        {"beta": 0.3, "use_bias_correction_kl": True, "loss_type": "dapo"},
        "grpo",
        TOKEN_MEAN | {"regularizers": [{"name": "kl", "coefficient": 0.3, "estimator": "k3_is"}]},
    ),
    "token_truncate": (
        VLLM | {"vllm_importance_sampling_clip_min": 0.9, "vllm_importance_sampling_clip_max": 1.2},
        "grpo",
        {"corrections": [{"name": "token_tis", "low": 0.9, "cap": 1.2}]},
    ),
    "token_mask": (
        VLLM | {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.8,
                "vllm_importance_sampling_clip_max": 1.3},
        "grpo",
        {"corrections": [{"name": "token_mis", "low": 0.8, "high": 1.3}]},
    ),
    "sequence_truncate": (
        VLLM | {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1.2},
        "grpo",
        {"corrections": [{"name": "sequence_tis", "cap": 1.2}]},
    ),
    "sequence_mask": (
        VLLM | {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.2},
        "grpo",
        {"corrections": [{"name": "sequence_mis", "high": 1.2}]},
    ),
    "top_entropy": ({"top_entropy_quantile": 0.4}, "grpo", {"corrections": [{"name": "top_entropy", "share": 0.4}]}),
    # TRL compares with the sampler whenever it has the sampler's numbers, with or without vLLM's correction.
    "opsm": ({"off_policy_mask_threshold": 0.1}, "grpo", {"corrections": [{"name": "opsm", "threshold": 0.1}]}),
    "entropy_bonus": (
        {"_entropy_bonus_enabled": True, "entropy_coef": 0.05},
        "grpo",
        {"regularizers": [{"name": "entropy_bonus", "coefficient": 0.05}]},
    ),
    "everything": (
        VLLM | {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1, "top_entropy_quantile": 0.7, "delta": 2.0},
        "dapo",
        {
            "gate": {"dual": 2.0},
            "regularizers": [{"name": "kl", "coefficient": 0.1, "estimator": "k3"}],
            "corrections": [{"name": "token_tis", "cap": 3.0}, {"name": "top_entropy", "share": 0.7}],
        },
    ),
    "scale_batch": ({"scale_rewards": "batch"}, "grpo", {"advantage": {"name": "batch_std", "eps": EPS}}),
    "scale_none": ({"scale_rewards": "none"}, "grpo", {"advantage": "group_mean"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_advantages_loss_and_gradient_are_those_of_trl(name: str) -> None:
    settings, preset, overrides = CASES[name]
    batch = random_batch()
    objective = resolve(preset, {"advantage": ADVANTAGE} | overrides)
    theirs, ours = by_trl(BareGRPO, batch, settings), by_temper(objective, batch)
    assert agree(theirs, ours), differences(theirs, ours)
    # The settings must have acted: agreement on what nothing changed would prove nothing.
    assert name == "grpo" or not agree(theirs, by_trl(BareGRPO, batch, {}))


def test_gmpo_is_that_of_trl() -> None:
    batch = random_batch()
    # The spread of the ratios is 0.3: at TRL's band of 0.4 some tokens are clipped and most are not.
    settings = {"epsilon_low": 0.4, "epsilon_high": 0.4}
    objective = resolve("grpo", {"advantage": ADVANTAGE, "gate": {"name": "gmpo", "band": 0.4}})
    theirs, ours = by_trl(BareGMPO, batch, settings), by_temper(objective, batch)
    assert agree(theirs, ours), differences(theirs, ours)


def test_rloo_with_the_kl_in_its_reward_is_that_of_trl() -> None:
    batch = random_batch(has_observations=False)  # TRL's RLOO has no tools
    theirs = by_trl(BareRLOO, batch, {"beta": 0.05})
    ours = by_temper(resolve("rloo"), batch)
    assert agree(theirs, ours), differences(theirs, ours)


def test_shares_of_clipped_tokens_kl_and_entropy_are_those_of_trl() -> None:
    batch = random_batch()
    overrides = {"advantage": ADVANTAGE, "regularizers": [{"name": "kl", "coefficient": 0.3, "estimator": "k3"}]}
    theirs = by_trl(BareGRPO, batch, {"beta": 0.3}).metrics
    ours = by_temper(resolve("grpo", overrides), batch).metrics
    same = {"clip_ratio/low_mean": "policy/clip_frac_low", "clip_ratio/high_mean": "policy/clip_frac_high",
            "kl": "policy/kl_ref_k3", "entropy": "policy/entropy"}  # fmt: skip
    assert theirs["clip_ratio/low_mean"] > 0
    for name, own in same.items():
        assert ours[own] == pytest.approx(theirs[name], abs=1e-6), name  # TRL counts in float32


def test_a_member_without_a_reward_leaves_the_baseline_of_the_others_as_in_trl() -> None:
    batch = random_batch()
    rewards_B = batch.rewards.clone()
    rewards_B[1] = torch.nan
    theirs = by_trl(BareGRPO, dataclasses.replace(batch, rewards=rewards_B), {}).advantages
    rest = [0, 2, 3]  # of the first group: Temper never lets the unscorable one in
    credit = Credit(
        rewards=rewards_B[rest],
        group_ids=torch.zeros(3, dtype=torch.int64),
        lengths=torch.ones(3, dtype=torch.int64),
        is_truncated=torch.zeros(3, dtype=torch.bool),
        max_new_tokens=1,
    )
    ours = advantages_of(resolve("grpo", {"advantage": ADVANTAGE}), credit).tokens
    assert torch.allclose(ours, theirs[rest], rtol=0, atol=TOLERANCE)
    assert theirs[1] == 0


@pytest.mark.parametrize(
    "overrides",
    [
        {"advantage": "group_mean_std"},  # another eps
        TOKEN_MEAN,
        {"gate": {"high": 0.28}},
        {"gate": "importance"},
        {"ratio": "sequence_geometric"},
        {"proximal": "behavior"},
        {"corrections": ["token_tis"]},
        {"regularizers": [{"name": "kl", "coefficient": 0.01}]},
    ],
    ids=str,
)
def test_the_comparison_rejects_another_objective(overrides: dict[str, Any]) -> None:
    batch = random_batch()
    objective = resolve("grpo", {"advantage": ADVANTAGE} | overrides)
    assert not agree(by_trl(BareGRPO, batch, {}), by_temper(objective, batch))
