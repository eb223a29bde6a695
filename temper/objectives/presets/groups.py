"""GRPO and what was changed in it: other baselines, other denominators, other ways to keep exploring.

Owns: the presets and their constants. Refuses: mathematics (the factors hold it).
"""

from __future__ import annotations

from dataclasses import replace

from temper.objectives.advantage.advantages import batch_std, group_mean, group_mean_std, maxrl, mgpo, per_reward
from temper.objectives.advantage.normalizers import whiten
from temper.objectives.advantage.shaping import soft_overlong
from temper.objectives.objective import PolicyObjective
from temper.objectives.policy.controllers import learned_length
from temper.objectives.policy.corrections import geometric_keep, opsm, sequence_mis, token_mis, token_tis, veto
from temper.objectives.policy.emphasis import entropy_shaped, top_choice_penalty
from temper.objectives.policy.gates import cispo, clip, importance
from temper.objectives.policy.proximals import behavior, trainer
from temper.objectives.policy.ratios import token, top_k_spread
from temper.objectives.policy.reference_rules import reset
from temper.objectives.policy.regularizers import kl, kl_cov
from temper.objectives.policy.selections import clip_cov, top_entropy
from temper.objectives.policy.weighting import constant_length, length_softmax, prompt_mean, sequence_mean, token_mean

DYNAMIC = frozenset({"dynamic_sampling"})

GRPO = PolicyObjective(
    name="grpo",
    advantage=group_mean_std(),
    proximal=trainer(),
    ratio=token(),
    gate=clip(low=0.2, high=0.2),
    weighting=sequence_mean(),
    formula="1/B sum_i 1/T_i sum_t min(r A_i, clip(r, 0.8, 1.2) A_i), A_i = (R_i - mean R) / (std R + 1e-6)",
    source="arXiv 2402.03300; TRL (loss_type grpo)",
    note="No KL, as in TRL. The paper's text has one, with 0.04, a number that no public code confirms: "
    'objective.regularizers = [{name = "kl", coefficient = 0.04, estimator = "k3"}].',
)

GRPO_R1 = replace(
    GRPO,
    name="grpo_r1",
    gate=clip(low=10.0, high=10.0),
    regularizers=(kl(coefficient=0.001, estimator="k3"),),
    formula="grpo with clip(r, 0, 11) and - 0.001 k3",
    source="arXiv 2501.12948, as quoted by TRL's paper index",
    note="DeepSeek-R1's settings: group_size = 16 and trainer.updates_per_batch = 16. k3 pulls along KL(ref || pi).",
    experimental="the constants are quoted by a third party, not read in the authors' code",
)

DR_GRPO = replace(
    GRPO,
    name="dr_grpo",
    advantage=group_mean(),
    weighting=constant_length(),
    formula="1/(B L) sum_it min(r A_i, clip(r, 0.8, 1.2) A_i), A_i = R_i - mean R, L = max_new_tokens",
    source="arXiv 2503.20783; understand-r1-zero",
    note="GRPO without its two biases: no division by length, none by standard deviation. "
    "Its steps are smaller by about T/L than those of grpo.",
)

DAPO = replace(
    GRPO,
    name="dapo",
    gate=clip(low=0.2, high=0.28),
    weighting=token_mean(),
    shaping=(soft_overlong(),),
    wants=DYNAMIC,
    formula="1/N sum_it min(r A_i, clip(r, 0.8, 1.28) A_i), A_i = (R_i - mean R) / (std R + 1e-6)",
    source="arXiv 2503.14476; verl (dapo)",
    note="Groups with equal rewards are replaced. The last fifth before max_new_tokens, or before "
    "rollout.max_episode_tokens, is punished (4096 of 20480 in the paper). "
    "Its filter for cut answers is a switch of its own: objective.train_truncated = false.",
)

MAXRL = replace(
    GRPO,
    name="maxrl",
    advantage=maxrl(),
    weighting=token_mean(),
    formula="1/N sum_it min(r A_i, clip(r, 0.8, 1.2) A_i), A_i = (R_i - mean R) / mean R",
    source="arXiv 2602.02710; maxrl, prime-rl, SkyRL",
    note="For rewards of 0 and 1: climbs the likelihood of success truncated at order G - 1, so hard tasks count more.",
)

MGPO = replace(
    GRPO,
    name="mgpo",
    advantage=mgpo(),
    formula="grpo with A_i exp(-lambda KL((p, 1-p) || (1/2, 1/2))), p = pass rate of the group",
    source="arXiv 2511.06221 (VibeThinker)",
    note="Tasks solved half of the time count most. lambda = 0 is grpo.",
)

GDPO = replace(
    GRPO,
    name="gdpo",
    advantage=per_reward(),
    normalizers=(whiten(),),
    formula="grpo with A = whiten(sum_k w_k (R_k - mean R_k) / (std R_k + 1e-6)) over the parts of the reward",
    source="arXiv 2601.05242; verl, TRL, NeMo-RL",
    note="For several rewards: each is compared on its own scale before they are added.",
)

LAMBDA_GRPO = replace(
    GRPO,
    name="lambda_grpo",
    weighting=length_softmax(),
    controllers=(learned_length(rate=0.1),),
    formula="1/N sum_i f_i sum_t min(r A_i, clip(r, 0.8, 1.2) A_i), f = G softmax(h^lambda), h = 1 + z(T)/9",
    source="arXiv 2510.06870; a third-party implementation",
    note="lambda starts at 0, which is token_mean, then learned. Above 0 long answers count more, below 0 short ones.",
    experimental="how lambda is trained (gradient, rate, sign) is not public; here it descends the loss at rate 0.1",
)

CLIP_COV = replace(
    GRPO,
    name="clip_cov",
    corrections=(clip_cov(),),
    weighting=token_mean(),
    formula="1/N sum_it min(r A, clip(r, 0.8, 1.2) A), without 0.02% of the tokens with 1 < cov(A, log pi) < 5",
    source="arXiv 2505.22617; verl (clip_cov)",
    note="Tokens whose probability and advantage move together use up entropy; a few of them are left out at random.",
)

KL_COV = replace(
    GRPO,
    name="kl_cov",
    gate=importance(),
    regularizers=(kl_cov(),),
    weighting=token_mean(),
    formula="1/N sum_it r A - |log pi - log pi_old| on the 0.02% of tokens with the largest cov(A, log pi)",
    source="arXiv 2505.22617; verl (kl_cov)",
    note="No clip: only the few tokens that would use up entropy are held back.",
)

TOP_ENTROPY = replace(
    GRPO,
    name="top_entropy",
    corrections=(top_entropy(share=0.2),),
    formula="grpo on the fifth of the batch's tokens with the highest entropy",
    source="arXiv 2506.01939; TRL (top_entropy_quantile)",
    note="80/20: only forking tokens are trained; the denominator still counts all of them.",
)

ENTROPY_ADVANTAGE = replace(
    GRPO,
    name="entropy_advantage",
    emphasis=(entropy_shaped(),),
    formula="grpo with A_t + min(0.4 H_t, |A_t| / 2)",
    source="arXiv 2506.14758; three independent implementations",
    note="Can shrink an advantage and never turns its sign.",
)

SIMKO = replace(
    GRPO,
    name="simko",
    ratio=top_k_spread(),
    emphasis=(top_choice_penalty(),),
    weighting=token_mean(),
    formula="1/N sum_it min(x A, clip(x, 0.8, 1.2) A), x = r in value; at forks of right answers 1% of its gradient "
    "goes to the 3 likeliest tokens; A x 1.1 where a wrong answer took the likeliest token",
    source="arXiv 2510.14807; SimKO",
    note="Against collapse onto one answer. Made for rewards of 0 and 1. One more forward pass per batch.",
)

OLMORL = replace(
    GRPO,
    name="olmorl",
    advantage=group_mean(),
    gate=clip(low=0.2, high=0.272),
    corrections=(token_tis(cap=2.0),),
    weighting=token_mean(),
    wants=DYNAMIC,
    formula="1/N sum_it min(pi_old/mu, 2) min(r A_i, clip(r, 0.8, 1.272) A_i), A_i = R_i - mean R",
    source="open-instruct (OLMo 3)",
    note="Meant for asynchronous training: rollout.max_staleness = 1 or more.",
)

SCALERL = replace(
    GRPO,
    name="scalerl",
    advantage=batch_std(),
    proximal=behavior(),
    gate=cispo(cap=5.0),
    weighting=prompt_mean(),
    wants=DYNAMIC,
    formula="1/P sum_p 1/N_p sum_it sg[min(pi/mu, 5)] A_i log pi(y_it), A_i = (R_i - mean R) / std over the batch",
    source="arXiv 2510.13786; TRL's paper index, PipelineRL, SkyRL",
    note="Meant for rollout.max_staleness = 8. Its no-positive-resampling and interruptions are sampling controls, not "
    "part of this loss.",
    experimental="pieced together from summaries; the exact constants and interruption text are not public",
)

PRORL = replace(
    GRPO,
    name="prorl",
    gate=clip(low=0.2, high=0.4),
    weighting=token_mean(),
    regularizers=(kl(coefficient=0.001, estimator="k2"),),
    reference=reset(every=200),
    wants=DYNAMIC,
    formula="1/N sum_it min(r A_i, clip(r, 0.8, 1.4) A_i) - 0.001 KL(pi || ref); ref := pi and new moments every 200",
    source="arXiv 2505.24864",
    note="For long runs: the reference follows, so that the KL does not stop progress. "
    'On a stall of the held-out score instead: objective.reference = {name = "reset", patience = 3}. Temperature 1.2.',
    experimental="only the temperature is confirmed; coefficient, clip range and period are not public",
)

DEEPSEEK_V32 = replace(
    GRPO,
    name="deepseek_v32",
    advantage=group_mean(),
    corrections=(opsm(),),
    regularizers=(kl(coefficient=0.001, estimator="k3_is"),),
    formula="1/B sum_i 1/T_i sum_t min(r A_i, clip(r, 0.8, 1.2) A_i) - 0.001 r k3, without answers with A_i < 0 and "
    "mean_t log(mu/pi) > 0.5",
    source="arXiv 2512.02556; TRL, slime",
    note="Its keep-routing and keep-sampling-mask belong to the sampler.",
    experimental="advantage normalisation, the masking threshold and the KL coefficient are not public",
)

INTELLECT2 = replace(
    GRPO,
    name="intellect2",
    gate=clip(low=0.2, high=0.2, dual=4.0),
    weighting=token_mean(),
    regularizers=(kl(coefficient=0.001, estimator="k3"),),
    formula="1/N sum_it min(min(r, 4) A_i, clip(r, 0.8, 1.2) A_i) - 0.001 k3",
    source="INTELLECT-2 report, via TRL (delta)",
    note="The bound at 4 stops tokens of negative advantage whose ratio ran away. Learning rate 3e-7 there.",
)

TIS = replace(
    GRPO,
    name="tis",
    corrections=(token_tis(cap=2.0),),
    formula="grpo with every token times min(pi_old/mu, 2)",
    source="Yao et al. 2025; verl, slime, open-instruct",
    note="For a sampler that disagrees with the trainer. Composes with any objective: "
    'objective.corrections = ["token_tis"].',
)

MIS = replace(
    GRPO,
    name="mis",
    corrections=(token_mis(low=0.5, high=5.0),),
    formula="grpo with every token times pi_old/mu, 0 outside [0.5, 5]",
    source="IcePop, arXiv 2510.18855; verl, NeMo-RL",
    note="Masks instead of truncating: a token the sampler got badly wrong teaches nothing.",
)

SEQUENCE_MIS = replace(
    GRPO,
    name="sequence_mis",
    corrections=(sequence_mis(high=3.0),),
    formula="grpo with every trajectory times prod_t pi_old/mu, 0 above 3",
    source="Liu, Li et al. 2025; TRL (sequence_mask)",
    note="Unbiased below the bound; rejects long answers when sampler and trainer differ.",
)

GEO_RS = replace(
    GRPO,
    name="geo_rs",
    corrections=(geometric_keep(), token_tis(cap=2.0), veto()),
    formula="grpo x min(pi_old/mu, 2), without trajectories whose geometric mean of pi_old/mu leaves [0.999, 1.001] or "
    "that hold a token with pi_old/mu < 1e-4",
    source="verl (rollout correction), slime",
    note="A filter by trajectory that does not depend on length, a weight by token, and a veto.",
)

PRESETS = (
    GRPO, GRPO_R1, DR_GRPO, DAPO, MAXRL, MGPO, GDPO, LAMBDA_GRPO, CLIP_COV, KL_COV, TOP_ENTROPY, ENTROPY_ADVANTAGE,
    SIMKO, OLMORL, SCALERL, PRORL, DEEPSEEK_V32, INTELLECT2, TIS, MIS, SEQUENCE_MIS, GEO_RS,
)  # fmt: skip
