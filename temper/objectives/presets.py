"""Named algorithms. A preset is a few lines: which factor of each kind, and where that is written down.

Owns: the table and its constants. Refuses: mathematics (the factors hold it) and changing a preset (resolve.py does).
"""

from __future__ import annotations

from temper.objectives.advantages import group_mean, group_mean_std, leave_one_out, raw
from temper.objectives.gates import cispo, clip, none
from temper.objectives.objective import Objective
from temper.objectives.ratios import sequence_geometric, sequence_product, token
from temper.objectives.shaping import kl_in_reward
from temper.objectives.weighting import constant_length, sequence_mean, sequence_sum, token_mean

_ALL = (
    Objective(
        name="reinforce",
        advantage=raw(),
        ratio=token(),
        gate=none(),
        weighting=sequence_sum(),
        formula="1/B sum_i R_i sum_t log pi(y_it)",
        source="Williams 1992; verl (reinforce)",
        note="No baseline: unbiased and noisy. The only preset that works with group_size = 1.",
    ),
    Objective(
        name="rloo",
        advantage=leave_one_out(),
        ratio=sequence_product(),
        gate=clip(low=0.2, high=0.2),
        weighting=sequence_mean(),
        shaping=(kl_in_reward(coefficient=0.05),),
        formula="1/B sum_i min(w_i A_i, clip(w_i, 0.8, 1.2) A_i), w_i = prod_t pi/pi_old, "
        "A_i = R_i - mean of the others, R_i -= 0.05 sum_t log(pi_old/pi_ref)",
        source="arXiv 2402.14740; TRL rloo_trainer",
        note="Keeps a reference model. Without it: objective.shaping = [].",
    ),
    Objective(
        name="grpo",
        advantage=group_mean_std(),
        ratio=token(),
        gate=clip(low=0.2, high=0.2),
        weighting=sequence_mean(),
        formula="1/B sum_i 1/T_i sum_t min(r A_i, clip(r, 0.8, 1.2) A_i), A_i = (R_i - mean R) / (std R + 1e-6)",
        source="arXiv 2402.03300; TRL (loss_type grpo)",
        note="No KL, as in TRL. The paper's text has one, with 0.04, a number that no public code confirms: "
        'objective.regularizers = [{name = "kl", coefficient = 0.04, estimator = "k3"}].',
    ),
    Objective(
        name="dr_grpo",
        advantage=group_mean(),
        ratio=token(),
        gate=clip(low=0.2, high=0.2),
        weighting=constant_length(),
        formula="1/(B L) sum_it min(r A_i, clip(r, 0.8, 1.2) A_i), A_i = R_i - mean R, L = max_new_tokens",
        source="arXiv 2503.20783; understand-r1-zero",
        note="GRPO without its two biases: no division by length, none by standard deviation. "
        "Its steps are smaller by about T/L than those of grpo.",
    ),
    Objective(
        name="dapo",
        advantage=group_mean_std(),
        ratio=token(),
        gate=clip(low=0.2, high=0.28),
        weighting=token_mean(),
        wants=frozenset({"dynamic_sampling", "overlong_shaping"}),
        formula="1/N sum_it min(r A_i, clip(r, 0.8, 1.28) A_i), A_i = (R_i - mean R) / (std R + 1e-6)",
        source="arXiv 2503.14476; verl (dapo)",
        note="Groups with equal rewards are replaced. For the soft punishment of long answers (20480 and 4096 tokens "
        'in the paper) add objective.shaping = [{name = "soft_overlong", buffer = 4096}].',
    ),
    Objective(
        name="gspo",
        advantage=group_mean_std(),
        ratio=sequence_geometric(),
        gate=clip(low=3e-4, high=4e-4),
        weighting=sequence_mean(),
        formula="1/B sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i), s_i = (prod_t pi/pi_old)^(1/T_i)",
        source="arXiv 2507.18071; verl (gspo), TRL",
        note="The clip range is three orders of magnitude below PPO's: 0.2 would switch clipping off. "
        "Meant for several updates per batch (trainer.updates_per_batch = 4 in the paper).",
    ),
    Objective(
        name="cispo",
        advantage=group_mean_std(),
        ratio=token(),
        gate=cispo(cap=5.0),
        weighting=token_mean(),
        formula="1/N sum_it sg[min(r, 5)] A_i log pi(y_it)",
        source="arXiv 2506.13585; TRL, slime, verl (cispo)",
        note="The cap is absolute and the one of ScaleRL and TRL; MiniMax's own is not public.",
    ),
)

PRESETS: dict[str, Objective] = {preset.name: preset for preset in _ALL}
