"""Every named algorithm, by name.

Owns: the table. Refuses: the definitions (named/) and changing one (resolve.py does).
"""

from __future__ import annotations

from temper.objectives.named import critics, groups, policy_gradient, trust_regions
from temper.objectives.objective import Objective

PRESETS: dict[str, Objective] = {
    preset.name: preset for family in (policy_gradient, groups, trust_regions, critics) for preset in family.PRESETS
}
