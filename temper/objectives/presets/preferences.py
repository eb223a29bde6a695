"""Preferences: pairs and labelled completions, from a data set or from rollouts.

Owns: the presets and their constants. Refuses: mathematics (the rules hold it).
"""

from __future__ import annotations

from dataclasses import replace

from temper.objectives.losses.pairs import PAIR_LOSSES, margin_memory
from temper.objectives.objective import DirectLoss, Loss


def _preset(loss: Loss, formula: str, source: str, note: str) -> DirectLoss:
    return DirectLoss(name=loss.name, loss=loss, formula=formula, source=source, note=note)


DPO = _preset(
    PAIR_LOSSES["dpo"](),
    formula="1/P sum -logsig(0.1 delta), delta = u_w - u_l, u = log pi(y) - log ref(y) over response tokens",
    source="arXiv 2305.18290; TRL",
    note="A large beta stays close to the reference, a small one allows larger drift. Watch preference/chosen_logprob.",
)
CDPO = _preset(
    PAIR_LOSSES["cdpo"](),
    formula="-(1 - e) logsig(0.1 delta) - e logsig(-0.1 delta), e = 0.1",
    source="Mitchell 2023; OpenRLHF",
    note="For labels of which a share e is flipped: keeps margins finite.",
)
ROBUST = _preset(
    PAIR_LOSSES["robust"](),
    formula="[-(1 - e) logsig(0.1 delta) + e logsig(-0.1 delta)] / (1 - 2e), e = 0.1",
    source="arXiv 2403.00409; TRL (robust)",
    note="Unbiased under flipped labels; the loss may be negative.",
)
IPO = _preset(
    PAIR_LOSSES["ipo"](),
    formula="(u_w/T_w - u_l/T_l - 1/(2 beta))^2, beta = 0.1",
    source="arXiv 2310.12036; TRL (ipo)",
    note="A target margin instead of an ever larger one, per token. Sums: loss = {average = 0}.",
)
HINGE = _preset(
    PAIR_LOSSES["hinge"](),
    formula="max(0, 1 - 0.1 delta)",
    source="SLiC, arXiv 2305.10425; TRL (hinge)",
    note="No gradient once a pair is separated.",
)
LENGTH_NORMALIZED = _preset(
    PAIR_LOSSES["length_normalized"](),
    formula="-logsig(0.1 (u_w/T_w - u_l/T_l))",
    source="TRL (sigmoid_norm)",
    note="DPO that gains nothing by length. Margins are per token, so a larger beta, e.g. 2, is usual.",
)
RPO = _preset(
    PAIR_LOSSES["rpo"](),
    formula="-logsig(0.1 delta) + alpha (-log pi(y_w)) / T_w, alpha = 1",
    source="arXiv 2404.19733; TRL (sigmoid + sft)",
    note="Keeps chosen answers likely, which is what is wanted for reasoning. alpha = 0.005 in RPO.",
)
DPO_SHIFT = _preset(
    PAIR_LOSSES["dpo_shift"](),
    formula="-logsig(0.1 (u_w - 0.95 u_l))",
    source="arXiv 2502.07599; DPO-Shift",
    note="Against likelihood displacement. A schedule: loss = {factor = 0.5, until = 1.0, steps = the stage's}.",
)
BETA_DPO = replace(
    _preset(
        PAIR_LOSSES["beta_dpo"](),
        formula="-logsig(b delta) on 0.8 of the pairs, drawn by exp(-((delta - M)/S)^2 / 2); "
        "b = 0.1 (1 + 0.6 (mean kept delta - M)), M and S moving averages",
        source="arXiv 2407.08639; beta-DPO",
        note="One more pass over each batch. Meant for batches of 16 pairs or more.",
    ),
    controllers=(margin_memory(),),
)
SIMPO = _preset(
    PAIR_LOSSES["simpo"](),
    formula="-logsig(2 (log pi(y_w)/T_w - log pi(y_l)/T_l) - 1)",
    source="arXiv 2405.14734; TRL (cpo, simpo)",
    note="No reference: half the memory, and nothing that holds the policy where it was. TRL's margin is 0.5.",
)
CPO = _preset(
    PAIR_LOSSES["cpo"](),
    formula="-logsig(0.1 (log pi(y_w) - log pi(y_l))) + (-log pi(y_w)) / T_w",
    source="arXiv 2401.08417; TRL (cpo)",
    note="DPO with a uniform reference, and the likelihood of the chosen answer.",
)
POWER = replace(
    _preset(
        PAIR_LOSSES["power"](),
        formula="-logsig(r_w - r_l) + 0.02 (-log pi(y_w)) / T_w, r = 2 (log pi(y) + 1) / T",
        source="arXiv 2412.09544",
        note="Against rewards that only look high where there is little data. No reference. Its moving labels are not "
        "here.",
    ),
    experimental="read in its paper, not in code: both constants are ours",
)
ORPO = _preset(
    PAIR_LOSSES["orpo"](),
    formula="-log pi(y_w)/T_w - 0.1 logsig(log odds_w - log odds_l), odds = P/(1 - P), P = exp(log pi / T)",
    source="arXiv 2403.07691; TRL (orpo)",
    note="Supervised learning and preference in one: starts from a base model, no reference.",
)
KTO = _preset(
    PAIR_LOSSES["kto"](),
    formula="good: 1 - sig(0.1 (u - z)), bad: 1 - sig(0.1 (z - u)), z = max(0, mean u of mismatched completions)",
    source="arXiv 2402.01306; TRL (kto)",
    note="Needs labels, not pairs; pairs are taken apart. Two tasks per step or more.",
)
XPO = replace(
    _preset(
        PAIR_LOSSES["xpo"](),
        formula="-logsig(0.1 delta) + 1e-5 log pi(what the reference said)",
        source="arXiv 2405.21046; TRL (xpo)",
        note="Each pair is a completion of the policy and one of the reference. Both are sampled, half of every group "
        'each (engine.kind = "local"); or the data brings them, and says which is which in "is_chosen_from_policy".',
    ),
    wants=frozenset({"dynamic_sampling"}),
)
ONLINE_DPO = replace(
    DPO,
    name="online_dpo",
    wants=frozenset({"dynamic_sampling"}),
    formula="DPO on the best and the worst of each group of fresh rollouts",
    source="arXiv 2402.04792; TRL (online_dpo)",
    note="Any reward or judge. group_size = 2 is the classic form. Every loss on pairs goes with it.",
)
NASH_MD = _preset(
    PAIR_LOSSES["nash_md"](),
    formula="1/B sum_i -(P(i wins) - 0.5) sum_t log pi_t + 0.1 sum_t sg[log pi_t - log ref_t] log pi_t; opponents are "
    "drawn from pi^0.5 ref^0.5",
    source="arXiv 2312.00886; TRL (nash_md)",
    note="On rollouts only; half of every group are opponents, which are never trained. Works with any reward, of "
    'which only the order counts. Needs engine.kind = "local".',
)

PRESETS = (
    DPO, CDPO, ROBUST, IPO, HINGE, LENGTH_NORMALIZED, RPO, DPO_SHIFT, BETA_DPO, SIMPO, CPO, POWER, ORPO, KTO, XPO,
    ONLINE_DPO, NASH_MD,
)  # fmt: skip
