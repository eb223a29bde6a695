"""Other trust regions on GRPO's advantages: how far one update may move a token or a sequence.

Owns: the presets and their constants. Refuses: mathematics (the factors hold it).
"""

from __future__ import annotations

from dataclasses import replace

from temper.objectives.advantage.advantages import group_mean
from temper.objectives.policy.gates import (
    acceptance,
    cispo,
    clip,
    dppo_kl,
    dppo_topk,
    dppo_tv,
    gmpo,
    quad,
    sapo,
    vespo,
)
from temper.objectives.policy.proximals import behavior
from temper.objectives.policy.ratios import router_shift, sequence_geometric, sequence_geometric_token, sequence_product
from temper.objectives.policy.regularizers import behavior_square
from temper.objectives.policy.weighting import token_mean
from temper.objectives.presets.groups import GRPO

GSPO = replace(
    GRPO,
    name="gspo",
    ratio=sequence_geometric(),
    gate=clip(low=3e-4, high=4e-4),
    formula="1/B sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i), s_i = (prod_t pi/pi_old)^(1/T_i)",
    source="arXiv 2507.18071; verl (gspo), TRL",
    note="The clip range is three orders of magnitude below PPO's: 0.2 would switch clipping off. "
    "Meant for several updates per batch (trainer.updates_per_batch = 4 in the paper).",
)

GSPO_TOKEN = replace(
    GSPO,
    name="gspo_token",
    ratio=sequence_geometric_token(),
    formula="1/B sum_i 1/T_i sum_t min(s_it A_it, clip(s_it) A_it), s_it = sg[s_i] pi_t / sg[pi_t]",
    source="arXiv 2507.18071; TRL (experimental), verl",
    note="Value of gspo; the gradient goes through each token, so advantages may differ inside an answer.",
)

CISPO = replace(
    GRPO,
    name="cispo",
    gate=cispo(cap=5.0),
    weighting=token_mean(),
    formula="1/N sum_it sg[min(r, 5)] A_i log pi(y_it)",
    source="arXiv 2506.13585; TRL, slime, verl (cispo)",
    note="No token loses its gradient; only the size is bounded. The cap is absolute, and that of ScaleRL and TRL; "
    "MiniMax's own is not public.",
)

SAPO = replace(
    GRPO,
    name="sapo",
    gate=sapo(positive=1.0, negative=1.05),
    formula="1/B sum_i 1/T_i sum_t 4/tau sigmoid(tau (r - 1)) A_i, tau = 1 for A > 0, else 1.05",
    source="arXiv 2511.20347; verl, TRL, AReaL",
    note="A soft gate in place of the clip: gradients fade instead of ending. There is no clip fraction to watch.",
)

DPPO_TV = replace(
    GRPO,
    name="dppo_tv",
    proximal=behavior(),
    gate=dppo_tv(low=0.15, high=0.15),
    weighting=token_mean(),
    formula="1/N sum_it sg[min(pi/mu, 20)] v_t A_i log pi(y_it), v = 0 where pi - mu passed 0.15 along A",
    source="arXiv 2602.04879; Stable-RL, verl (dppo_tv)",
    note="Bounds the change of probability, not of the ratio: rare tokens may grow freely.",
)

DPPO_KL = replace(
    DPPO_TV,
    name="dppo_kl",
    gate=dppo_kl(low=0.05, high=0.05),
    formula="1/N sum_it sg[min(pi/mu, 20)] v_t A_i log pi(y_it), v = 0 where the binary KL passed 0.05 along A",
    source="arXiv 2602.04879; Stable-RL, verl (dppo_kl)",
)

DPPO_TOPK = replace(
    DPPO_TV,
    name="dppo_topk",
    gate=dppo_topk(),
    formula="dppo_tv with the divergence over the sampler's K likeliest tokens and one bucket for the rest",
    source="arXiv 2602.04879; Stable-RL",
    note="The sampler returns its K likeliest tokens at every position.",
)

PRIME_RL = replace(
    GRPO,
    name="prime_rl",
    advantage=group_mean(),
    proximal=behavior(),
    gate=quad(low=0.2, high=0.2),
    weighting=token_mean(),
    regularizers=(behavior_square(coefficient=1e-3),),
    formula="1/N sum_it v_t (pi/mu) A_i - 0.001 (log pi/mu)^2, v = 0 where pi - mu passed 0.2 along A",
    source="prime-rl (default loss)",
    note="A pull back to the sampler on every token, and a mask on those that went too far.",
)

GMPO = replace(
    GRPO,
    name="gmpo",
    gate=gmpo(band=0.4),
    formula="1/B sum_i A_i exp(mean_t z_t), z = log r clipped to +-0.4 against the direction of A",
    source="arXiv 2507.20673; verl (geo_mean), TRL",
    note="The geometric mean of an answer's ratios: a single outlier cannot dominate.",
)

VESPO = replace(
    GRPO,
    name="vespo",
    proximal=behavior(),
    ratio=sequence_product(),
    gate=vespo(),
    weighting=token_mean(),
    formula="1/N sum_it sg[phi(W_i)] A_i log pi(y_it), W_i = prod_t pi/mu, phi(W) = W^k exp(lambda (1 - W))",
    source="arXiv 2602.10693; VESPO, TRL",
    note="Weighs whole answers; long ones that drifted fade to 0.",
)

RSPO = replace(
    GMPO,
    name="rspo",
    ratio=router_shift(floor=0.8),
    formula="gmpo with r_t sg[max(exp(-Delta_t), 0.8)], Delta = mean shift of the router's log-probabilities",
    source="arXiv 2510.23027 (abstract); third-party code",
    note="For mixture-of-experts models only. One more forward pass per batch records the experts.",
    experimental="established from the abstract and third-party code only",
)

RGPO = replace(
    GRPO,
    name="rgpo",
    gate=acceptance(sharpness=4.0),
    weighting=token_mean(),
    formula="1/N sum_it g(r) A_i, g(r) = sigmoid(4 (r - 1))",
    source="arXiv 2604.14895 (abstract)",
    note="A gate into [0, 1] whose slope is the weight of the gradient. Equal to sapo with tau = 4.",
    experimental="only the idea is public: a smooth acceptance gate; this gate and its sharpness are Temper's choice",
)

PRESETS = (
    GSPO, GSPO_TOKEN, CISPO, SAPO, DPPO_TV, DPPO_KL, DPPO_TOPK, PRIME_RL, GMPO, VESPO, RSPO, RGPO,
)  # fmt: skip
