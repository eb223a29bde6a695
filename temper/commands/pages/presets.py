"""docs/reference/presets.md: every objective that has a name, as `temper presets NAME` prints it.

Owns: the page. Refuses: factors (objectives.py) and formulas, which the presets hold.
"""

from __future__ import annotations

from temper.objectives import FAMILIES, describe

INTRO = """# Presets

Written by `temper pages docs`; do not edit. `temper presets NAME` prints one of these,
`temper presets --compare dapo gspo` what differs between two;
[objectives](../objectives.md) explains the factors and draws the gates.

```toml
objective = { preset = "dapo", gate = "sapo", corrections = ["token_tis", "veto"] }
```
"""


def presets_text() -> str:
    parts = [INTRO]
    for title, family in FAMILIES.items():
        parts.append(f"## {title[:1].upper()}{title[1:]}\n")
        parts += [f"### {preset.name}\n\n```text\n{describe(preset.name)}\n```\n" for preset in family]
    return "\n".join(parts)
