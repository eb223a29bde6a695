"""Which factors go together: combinations that would train something else than they say, or not what they name.

Owns: every complaint about an objective as a whole. A factor acts on some batch, or the objective is refused with what
to do. Refuses: names and arguments (resolve.py), and what depends on the rest of a recipe (build/objective.py).
"""

from __future__ import annotations

from typing import Any

from temper.errors import UserError
from temper.objectives.advantage.shaping import SHAPINGS
from temper.objectives.factor import Factor
from temper.objectives.objective import DirectLoss, Objective, PolicyObjective

SAMPLER_WEIGHTS = frozenset(
    {
        "token_tis", "token_mis", "token_importance", "sequence_tis", "sequence_mis", "geometric_keep", "kl_keep",
        "veto", "m2po",
    }
)  # fmt: skip
"""Corrections that compare the proximal policy with the sampler."""
RESCALING = frozenset({"batch_normalize", "kept_denominator"})
UNDROPPING = frozenset({"token_importance", "token_tis", "sequence_tis"})
"""Corrections that weigh tokens and drop none."""
UNSHAPED = {
    "per_reward": "compares the parts of the reward",
    "turn_returns": "compares what turns were paid",
    "distillation": "reads a teacher and no reward",
}
"""Advantages that do not read the outcome that shaping changes, and what they read."""


def check_objective(objective: Objective, *, group_size: int) -> None:
    """Refuses combinations that would train something else than they say."""
    problems = [check(objective, group_size) for check in _CHECKS]
    if isinstance(objective, PolicyObjective):
        problems += [check(objective) for check in _POLICY_CHECKS]
    for problem in filter(None, problems):
        raise UserError(problem)


def corrects_staleness(objective: PolicyObjective) -> bool:
    """Whether something compares the policy with the one that drew the samples, so that older samples count as such."""
    if any(correct.name in SAMPLER_WEIGHTS or correct.name == "opsm" for correct in objective.corrections):
        return True
    return objective.proximal.name in ("behavior", "interpolated") and objective.gate.name != "none"


def notices_moving(objective: PolicyObjective) -> bool:
    """Whether something compares the policy of now with one that stands still while a batch is trained."""
    if objective.proximal.name in ("current", "interpolated"):  # these move along; then a weight against the sampler
        weighs = any(correct.name in SAMPLER_WEIGHTS for correct in objective.corrections)
        return weighs or (objective.proximal.name == "interpolated" and objective.gate.name != "none")
    return objective.gate.name != "none"


def wants_time_order(objective: Objective) -> list[str]:
    """What to change so that credit does not depend on the order in which the turns of an episode stand. Empty: it
    does not."""
    if not isinstance(objective, PolicyObjective):
        return []
    changes = [
        f"{factor.name} with {name} = {neutral}, not {factor.argument(name)}"
        for factor in objective.credit_factors
        for name, neutral in factor.along.items()
        if factor.argument(name) != neutral
    ]
    # What is paid at a token is credited to those that stand before it.
    summing = [factor.name for factor in (objective.advantage, objective.critic) if factor is not None and factor.along]
    if summing and any(shape.name == "kl_in_reward" and shape.argument("coefficient") for shape in objective.shaping):
        changes.append(f"shaping without kl_in_reward, which {' and '.join(summing)} would sum (use regularizers kl)")
    return changes


def _check_group_size(objective: Objective, group_size: int) -> str | None:
    """Silently falling back to A = R would train something else."""
    if group_size >= objective.min_group:
        return None
    comparing = max(objective.factors, key=lambda factor: factor.min_group)
    return (
        f"group_size={group_size} is too small for objective {objective.name}: {comparing.name} compares a "
        f"completion with others of its group. Use group_size={objective.min_group} or more (8 is usual), or the "
        f'preset "reinforce", which needs no group.'
    )


def _check_bypass(objective: PolicyObjective) -> str | None:
    """A ratio against the sampler already holds the correction; corrections on top would count it twice."""
    twice = [correct.name for correct in objective.corrections if correct.name in SAMPLER_WEIGHTS]
    if objective.proximal.name != "behavior" or not twice:
        return None
    return (
        f'objective.proximal="behavior" takes the ratio against the sampler, which already contains the correction; '
        f'corrections {", ".join(twice)} would count it twice. Use proximal="trainer", or corrections = [].'
    )


def _check_top_tokens(objective: Objective, group_size: int) -> str | None:
    if not {"sampler_top_k", "policy_top_k"} <= objective.needs:
        return None
    return (
        f"objective {objective.name} asks for the likeliest tokens of both the sampler and the trainer, and a batch "
        f"carries one of them. Use factors of dppo_topk or of simko, not of both."
    )


def _check_critic(objective: PolicyObjective) -> str | None:
    reads_values = "values" in objective.advantage.needs
    if reads_values and objective.critic is None:
        return f'objective.advantage {objective.advantage.name} needs a critic. Add objective.critic = "gae_targets".'
    if objective.critic is not None and not reads_values:
        return (
            f"objective.critic = {objective.critic} would train a critic that advantage {objective.advantage.name} "
            f'does not read. Use objective.advantage = "gae", or leave the critic out.'
        )
    return None


def _check_reference(objective: Objective, group_size: int) -> str | None:
    readers = [factor for factor in objective.factors if factor is not objective.reference]
    if objective.reference is None or any("reference" in factor.needs for factor in readers):
        return None
    return (
        f"objective.reference = {objective.reference} moves a reference model, but nothing compares with one. Add "
        f'objective.regularizers = [{{name = "kl", coefficient = 0.001}}], or leave objective.reference out.'
    )


def _check_scales(objective: Objective, group_size: int) -> str | None:
    """A controller of a factor that is not there would run and change nothing."""
    scaled = {name for controller in objective.controllers for name in controller({}, {}) if "." not in name}
    if not (missing := scaled - {factor.name for factor in objective.factors}):
        return None
    return f"objective.controllers steer {', '.join(sorted(missing))}, which objective {objective.name} does not have."


def _check_memory(objective: Objective, group_size: int) -> str | None:
    """beta-DPO compares margins with those of earlier batches, and nobody else reads what remembers them."""
    compares = isinstance(objective, DirectLoss) and objective.loss.name == "beta_dpo"
    remembers = any(controller.name == "margin_memory" for controller in objective.controllers)
    if compares and not remembers:
        return 'beta_dpo compares margins with those of earlier batches. Add objective.controllers = ["margin_memory"].'
    if remembers and not compares:
        return f"objective.controllers margin_memory would do nothing: {objective.name} has no loss beta_dpo."
    return None


def _check_shaping(objective: PolicyObjective) -> str | None:
    """Terms first, then the rule for cut answers, then the clip, then the KL: in another order they undo each other."""
    names, order = [shape.name for shape in objective.shaping], list(SHAPINGS)
    if names != sorted(names, key=order.index):
        return f"objective.shaping = {names} is out of order. Use {sorted(names, key=order.index)}."
    advantage = objective.advantage
    if names and advantage.name in UNSHAPED:
        return (
            f"objective.advantage {advantage.name} {UNSHAPED[advantage.name]}, which objective.shaping = {names} does "
            f"not reach. Use shaping = [], and put such a term into a [[reward]] of its own."
        )
    if "exclude_truncated_from_stats" in names and advantage.min_group < 2:
        return (
            f"exclude_truncated_from_stats takes cut answers out of their group's mean, and advantage {advantage.name} "
            f"has none. Leave it out, or use an advantage that compares the members of a group."
        )
    return None


def _check_gate(objective: PolicyObjective) -> str | None:
    """Without a ratio in the gate, who it is taken against and at which level would make no difference."""
    if objective.gate.name != "none":
        return None
    if objective.ratio.name != "token":
        return (
            f"objective.ratio {objective.ratio.name} would do nothing: the gate none takes no ratio. Use another gate, "
            f'e.g. objective.gate = "clip", or leave the ratio out.'
        )
    others: tuple[Factor[Any, Any], ...] = (*objective.corrections, *objective.regularizers)
    if objective.proximal.name != "trainer" and not any(map(_reads_proximal, others)):
        return (
            f"objective.proximal {objective.proximal.name} would do nothing: the gate none takes no ratio, and nothing "
            f'else compares with it. Add objective.corrections = ["token_tis"], or use objective.gate = "clip".'
        )
    return None


def _reads_proximal(factor: Factor[Any, Any]) -> bool:
    estimator = dict(factor.arguments).get("estimator")
    return factor.name in SAMPLER_WEIGHTS or factor.name == "kl_cov" or estimator == "k3_is"


def _check_rescaling(objective: PolicyObjective) -> str | None:
    names = {correct.name for correct in objective.corrections}
    if names >= RESCALING:
        return "kept_denominator and batch_normalize both make up for dropped tokens, twice together. Use one of them."
    others = names - RESCALING
    if "batch_normalize" in names and not others:
        return (
            "batch_normalize would do nothing: it rescales what other corrections do, and there is none. Add one, e.g. "
            'objective.corrections = ["token_tis", "batch_normalize"].'
        )
    if "kept_denominator" in names and not others - UNDROPPING:
        return (
            "kept_denominator would do nothing: it takes dropped tokens out of the denominator, and no correction "
            'drops any. Add one, e.g. objective.corrections = ["token_mis", "kept_denominator"].'
        )
    return None


def _check_clip_cov(objective: PolicyObjective) -> str | None:
    reads = (objective.ratio.needs | objective.gate.needs) & {"sampler_top_k", "policy_top_k"}
    if not reads or all(correct.name != "clip_cov" for correct in objective.corrections):
        return None
    return 'clip_cov cannot ask a gate that reads the likeliest tokens. Use ratio = "token" and gate = "clip".'


_CHECKS = (_check_group_size, _check_top_tokens, _check_reference, _check_scales, _check_memory)
_POLICY_CHECKS = (_check_bypass, _check_critic, _check_shaping, _check_gate, _check_rescaling, _check_clip_cov)
