"""Learning from a teacher's distributions. By policy gradient: opd (critics.py).

Owns: the presets and their constants. Refuses: mathematics (the losses hold it).
"""

from __future__ import annotations

from dataclasses import replace

from temper.objectives.losses.divergences import gkd, k2, top_k_teacher
from temper.objectives.objective import DirectLoss
from temper.objectives.policy.weighting import token_mean

GKD = DirectLoss(
    name="gkd",
    weighting=token_mean(),
    loss=gkd(beta=0.5, temperature=0.9, lmbda=0.5),
    formula="1/N sum_it [b KL(Q || M) + (1-b) KL(S || M)], M = b Q + (1-b) S, b = 0.5, both at temperature 0.9; texts "
    "of the student with probability 0.5, else of the data set",
    source="arXiv 2306.13649; TRL (gkd)",
    note="Whole distributions of a teacher (model.teacher) with the same tokenizer, no reward. b = 0 is KL(Q || S), "
    "b = 1 KL(S || Q). lmbda = 1 trains on the student's samples only, lmbda = 0 on given texts only.",
)

OFF_POLICY_DISTILLATION = replace(
    GKD,
    name="off_policy_distillation",
    loss=gkd(beta=0.0, temperature=1.0, lmbda=0.0),
    formula="1/N sum_it KL(Q || S) on texts of the data set",
    source="arXiv 1503.02531, 1606.07947 (word level); TRL (gkd with lmbda = 0)",
    note="Needs no sampling. Best with texts that the teacher wrote; the student meets its own mistakes only later.",
)

OPD_DIRECT = replace(
    GKD,
    name="opd_direct",
    loss=k2(),
    formula="1/N sum_it (log S - log Q)^2 / 2 on tokens that the student drew",
    source="joschu.net/blog/kl-approx (k2)",
    note="opd without a policy gradient: the same direction, KL(S || Q), backpropagated through the student. Only the "
    "teacher's log-probabilities of drawn tokens are needed.",
)

OPD_TOP_K = replace(
    GKD,
    name="opd_top_k",
    loss=top_k_teacher(k=64, lmbda=1.0),
    formula="1/N sum_it [sum_k Q_k log(Q_k/S_k) + Q_rest log(Q_rest/S_rest)] over the teacher's 64 likeliest tokens, "
    "where the student drew",
    source="verl (top-k distillation)",
    note="KL(Q || S) from a few tokens per position. All others are one bucket, so it is never negative.",
    experimental="public code has no bucket for the rest and clamps at 0; the bucket is ours",
)

PRESETS = (GKD, OFF_POLICY_DISTILLATION, OPD_DIRECT, OPD_TOP_K)
