"""Every named algorithm, by name and by what it learns from.

Owns: the tables. Refuses: the definitions (beside this file, and losses/) and changing one (resolve.py does).
"""

from __future__ import annotations

from temper.objectives.losses import likelihood, scores
from temper.objectives.objective import DirectLoss, Objective, PolicyObjective
from temper.objectives.presets import critics, distillation, groups, policy_gradient, preferences, trust_regions

FAMILIES: dict[str, tuple[Objective, ...]] = {
    "policy gradients": (*policy_gradient.PRESETS, *groups.PRESETS, *trust_regions.PRESETS, *critics.PRESETS),
    "given texts": likelihood.LIKELIHOOD_PRESETS,
    "preferences": preferences.PRESETS,
    "reward models": scores.PRESETS,
    "distillation": distillation.PRESETS,
}
"""What people choose among. All but the first have a direct loss."""
PRESETS: dict[str, Objective] = {preset.name: preset for family in FAMILIES.values() for preset in family}
POLICY_GRADIENTS: dict[str, PolicyObjective] = {
    name: preset for name, preset in PRESETS.items() if isinstance(preset, PolicyObjective)
}
"""Presets whose factors multiply: what holds for ratio, gate and corrections holds for these."""
DIRECT_LOSSES: dict[str, DirectLoss] = {
    name: preset for name, preset in PRESETS.items() if isinstance(preset, DirectLoss)
}
