"""Credit inside an answer: critics, Monte-Carlo step values, a teacher; and the constrained step.

Owns: the presets and their constants. Refuses: mathematics (the factors hold it).
"""

from __future__ import annotations

from dataclasses import replace

from temper.objectives.advantage.critics import gae_targets
from temper.objectives.advantage.normalizers import whiten
from temper.objectives.advantage.shaping import kl_in_reward
from temper.objectives.advantage.token_advantages import distillation, gae, gae_by_length, step_values
from temper.objectives.objective import PolicyObjective
from temper.objectives.policy.constrained import trpo
from temper.objectives.policy.corrections import token_importance
from temper.objectives.policy.gates import clip, importance
from temper.objectives.policy.proximals import behavior, interpolated, trainer
from temper.objectives.policy.ratios import token
from temper.objectives.policy.regularizers import kl, positive_nll
from temper.objectives.policy.weighting import token_mean
from temper.objectives.presets.groups import GRPO

PPO = PolicyObjective(
    name="ppo",
    advantage=gae(gamma=1.0, lam=0.95),
    normalizers=(whiten(),),
    critic=gae_targets(gamma=1.0, lam=0.95, clip=0.2),
    proximal=trainer(),
    ratio=token(),
    gate=clip(low=0.2, high=0.2),
    weighting=token_mean(),
    shaping=(kl_in_reward(coefficient=0.05),),
    formula="1/N sum_it min(r A_it, clip(r, 0.8, 1.2) A_it), A = whiten(GAE(0.95)), R_t = -0.05 log(pi_old/pi_ref) + "
    "[t last] R_i; critic: 1/2 max((V - R)^2, (clip(V, V_old +- 0.2) - R)^2)",
    source="arXiv 1707.06347, 1506.02438; TRL, verl",
    note="Trains a critic of the policy's size with an optimiser of its own (optim.critic_learning_rate). Works with "
    "group_size = 1. Dual clip: objective.gate = {dual = 3.0}.",
)

VAPO = replace(
    PPO,
    name="vapo",
    advantage=gae_by_length(alpha=0.05),
    critic=gae_targets(gamma=1.0, lam=1.0, clip=0.2, pretraining_steps=50),
    gate=clip(low=0.2, high=0.28),
    shaping=(),
    regularizers=(positive_nll(coefficient=0.1),),
    formula="1/N sum_it min(r A, clip(r, 0.8, 1.28) A) - 0.1 NLL of right answers, A = whiten(GAE(1 - 1/(0.05 T)))",
    source="arXiv 2504.05118, from summaries; NeMo-RL (NLL)",
    note="The critic is trained alone for 50 steps first, on whole returns; then the policy's learning rate begins to "
    "warm up. For fewer steps: objective.critic = {pretraining_steps = 10}. 16 samples per task in the paper.",
    experimental="pieced together from summaries of the paper; the floor of lambda at 0 is ours",
)

VINEPPO = replace(
    GRPO,
    name="vineppo",
    advantage=step_values(),
    weighting=token_mean(),
    regularizers=(kl(coefficient=1e-4, estimator="k3"),),
    formula="1/N sum_it min(r A_it, clip(r, 0.8, 1.2) A_it) - 1e-4 k3, A of a step = V(after it) - V(before it), "
    "V = mean reward of 9 fresh rollouts",
    source="arXiv 2410.01679; VinePPO",
    note="No critic; 9 extra rollouts from the start of every step (line) of every answer. Single-turn tasks only.",
    experimental="the KL coefficient of the paper's runs is not recorded; 1e-4 is ours",
)

TRPO = replace(
    GRPO,
    name="trpo",
    gate=importance(),
    weighting=token_mean(),
    step=trpo(),
    formula="max 1/N sum_it r A_i subject to mean KL(pi_old || pi) <= 0.01, by conjugate gradient and line search",
    source="arXiv 1502.05477",
    note="For small float32 models: each step needs a dozen passes. Learning rate and moments are not used.",
)

DECOUPLED_PPO = replace(
    GRPO,
    name="decoupled_ppo",
    corrections=(token_importance(),),
    weighting=token_mean(),
    formula="1/N sum_it (pi_old/mu) min(r A, clip(r, 0.8, 1.2) A), r = pi/pi_old",
    source="arXiv 2110.00641, 2505.24298; AReaL",
    note="For asynchronous training: r bounds the update, pi_old/mu corrects for stale samples. A critic's advantage "
    'goes with it: objective.advantage = "gae", objective.critic = "gae_targets".',
)

A3PO = replace(
    DECOUPLED_PPO,
    name="a3po",
    proximal=interpolated(),
    formula="decoupled_ppo with log pi_old = log mu + (d-1)/d (sg[log pi] - log mu), d = staleness of the token",
    source="arXiv 2512.06547; AReaL",
    note="Needs no pass for pi_old. With fresh samples it is PPO against the sampler.",
)

OPD = replace(
    GRPO,
    name="opd",
    advantage=distillation(coefficient=1.0),
    proximal=behavior(),
    gate=importance(),
    weighting=token_mean(),
    formula="1/N sum_it (pi/mu) A_t, A_t = -(log mu - log pi_teacher)",
    source="Thinking Machines 2025; tinker-cookbook, slime, verl",
    note="On-policy distillation: the student samples, a teacher (model.teacher) scores every token. Reverse KL. "
    "Works with group_size = 1.",
)

PRESETS = (PPO, VAPO, VINEPPO, TRPO, DECOUPLED_PPO, A3PO, OPD)
