"""REINFORCE and its kin: policy gradients whose baseline needs no critic.

Owns: the presets and their constants. Refuses: mathematics (the factors hold it).
"""

from __future__ import annotations

from dataclasses import replace

from temper.objectives.advantage.advantages import group_mean, leave_one_out, length_weighted, raw
from temper.objectives.advantage.normalizers import whiten
from temper.objectives.advantage.shaping import kl_in_reward
from temper.objectives.advantage.token_advantages import greedy_baseline, returns_to_go
from temper.objectives.objective import PolicyObjective
from temper.objectives.policy.corrections import token_tis
from temper.objectives.policy.gates import clip, none
from temper.objectives.policy.proximals import current, trainer
from temper.objectives.policy.ratios import sequence_product, token
from temper.objectives.policy.regularizers import kl
from temper.objectives.policy.weighting import sequence_mean, sequence_sum, token_mean

REINFORCE = PolicyObjective(
    name="reinforce",
    advantage=raw(),
    proximal=trainer(),
    ratio=token(),
    gate=none(),
    weighting=sequence_sum(),
    formula="1/B sum_i R_i sum_t log pi(y_it)",
    source="Williams 1992; verl (reinforce)",
    note="No baseline: unbiased and noisy. Works with group_size = 1.",
)

REINFORCE_IS = replace(
    REINFORCE,
    name="reinforce_is",
    advantage=group_mean(),
    proximal=current(),
    corrections=(token_tis(cap=2.0),),
    formula="1/B sum_it min(pi/mu, 2) A_i log pi(y_it), A_i = R_i - mean R",
    source="verl (bypass mode, reinforce)",
    note="The one ratio is pi/mu, as a constant weight: it corrects for the sampler and for earlier updates at once. "
    "Any advantage goes with it.",
)

RLOO = PolicyObjective(
    name="rloo",
    advantage=leave_one_out(),
    proximal=trainer(),
    ratio=sequence_product(),
    gate=clip(low=0.2, high=0.2),
    weighting=sequence_mean(),
    shaping=(kl_in_reward(coefficient=0.05),),
    formula="1/B sum_i min(w_i A_i, clip(w_i, 0.8, 1.2) A_i), w_i = prod_t pi/pi_old, "
    "A_i = R_i - mean of the others, R_i -= 0.05 sum_t log(pi_old/pi_ref)",
    source="arXiv 2402.14740; TRL rloo_trainer",
    note="Keeps a reference model. Without it: objective.shaping = [].",
)

REINFORCE_PP = PolicyObjective(
    name="reinforce_pp",
    advantage=returns_to_go(gamma=1.0),
    normalizers=(whiten(),),
    proximal=trainer(),
    ratio=token(),
    gate=clip(low=0.2, high=0.2),
    weighting=token_mean(),
    shaping=(kl_in_reward(coefficient=0.001),),
    formula="1/N sum_it min(r A_it, clip(r, 0.8, 1.2) A_it), A = whiten(sum_{s>=t} R_s), "
    "R_t = -0.001 log(pi_old/pi_ref) + [t last] R_i",
    source="arXiv 2501.03262; OpenRLHF, verl",
    note="No group is needed: the baseline is the mean over the batch. Public code uses 0.001 to 0.01 for the KL.",
)

REINFORCE_PP_BASELINE = replace(
    REINFORCE_PP,
    name="reinforce_pp_baseline",
    advantage=group_mean(),
    shaping=(),
    regularizers=(kl(coefficient=0.001, estimator="k2"),),
    formula="1/N sum_it min(r A_i, clip(r, 0.8, 1.2) A_i) - 0.001 k2, A = whiten(R_i - mean R)",
    source="OpenRLHF (reinforce_baseline), verl, NeMo-RL",
    note="Whitening counts tokens, so long answers weigh more in its statistics.",
    experimental="the KL is a separate k2 loss in the paper's text only; public code differs in form and coefficient",
)

REMAX = PolicyObjective(
    name="remax",
    advantage=greedy_baseline(gamma=1.0),
    proximal=trainer(),
    ratio=token(),
    gate=none(),
    weighting=sequence_sum(),
    shaping=(kl_in_reward(coefficient=0.05),),
    formula="1/B sum_it (G_t - R(greedy answer)) log pi(y_it), G_t = sum_{s>=t} R_s",
    source="arXiv 2310.10505; verl (remax)",
    note="One more, greedy rollout per task. Works with group_size = 1. Without the KL: objective.shaping = [].",
)

OPO = replace(
    REINFORCE,
    name="opo",
    advantage=length_weighted(),
    formula="1/B sum_i (R_i - sum_j T_j R_j / sum_j T_j) sum_t log pi(y_it)",
    source="arXiv 2505.23585; verl (opo)",
    note="The baseline of least variance when the variance of a score grows with its length.",
)

PRESETS = (REINFORCE, REINFORCE_IS, RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE, REMAX, OPO)
