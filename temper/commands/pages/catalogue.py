"""docs/reference/rewards.md and environments.md, from the catalogue of what a recipe can name.

Owns: the two pages. Names, options and defaults are the code's, texts its docstrings; nothing is typed twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from temper.asking.endpoint import EndpointOptions
from temper.catalogue import ENVIRONMENTS, GENERATORS, REWARDS
from temper.commands.pages.entries import doc_of, fields_of, first_line, options_line, plain, table
from temper.envs.adapters.verifiers import VerifiersEnv, VerifiersReward
from temper.rewards.form.text import COMPARISONS
from temper.rewards.judges.judge import JudgeOptions

REWARDS_INTRO = """# Rewards by name

Written by `temper pages docs`; do not edit. What they mean, how they are combined and what they refuse:
[rewards](../rewards.md), [judges](../judges.md), [reward models](../reward_models.md).

```toml
[[reward]]
kind = "length"                      # a name of this page, or "file.py:function" for one of your own
weight = 0.1
options = { high = 400, margin = 50 }
```

## Rewards
"""
ENVIRONMENTS_INTRO = """# Environments and generators by name

Written by `temper pages docs`; do not edit. How an environment works and how to write one:
[environments](../environments.md), [adapters](../adapters.md) to those of other packages.

```toml
env = { name = "calculator", options = { max_calls = 2 } }      # or "file.py:Class" for one of your own

[[train]]
generator = "arithmetic"                                        # or "file.py:function"
options = { digits = 2 }
```

## Environments
"""
GENERATORS_INTRO = """## Generators of tasks

A generator makes task number `index` from a seed; what follows may be set in `train.options` and `heldout.options`.
"""
JUDGES_OPTIONS = "and the [options of judges](#options-of-judges)"
PASSED_ON = "and what it passes on to its package"
OWN_FURTHER: Mapping[Callable[..., Any], str] = dict.fromkeys(
    (VerifiersEnv, VerifiersReward), "and [those of its judge](../adapters.md#models-that-an-environment-asks)"
)
"""What else those take whose further options are neither a judging reward's nor a package's."""
JUDGES_INTRO = """## Options of judges

Of `judge`, `pairwise`, `rubric` and `evolving_rubric`, beside their own:
"""
GIVEN = ("index", "seed")
"""What a generator is called with, beside its options."""


def rewards_text() -> str:
    judging = "\n".join(line for cls in (JudgeOptions, EndpointOptions) for line in fields_of(cls))
    return "\n".join([REWARDS_INTRO, _entries(REWARDS, reward_doc, "", JUDGES_OPTIONS), JUDGES_INTRO, judging, ""])


def environments_text() -> str:
    played = _entries(ENVIRONMENTS, lambda name: doc_of(ENVIRONMENTS[name]), "env", PASSED_ON)
    made = _entries(GENERATORS, lambda name: doc_of(GENERATORS[name]), "generator", PASSED_ON, GIVEN)
    return "\n".join([ENVIRONMENTS_INTRO, played, GENERATORS_INTRO, made])


def reward_doc(name: str) -> str:
    """Comparisons of texts share one class; what differs stands under their functions."""
    own = inspect.getdoc(COMPARISONS[name]) if name in COMPARISONS else None
    return "\n\n".join(filter(None, [own, doc_of(REWARDS[name])]))


def _entries(
    builders: Mapping[str, Callable[..., Any]],
    doc: Callable[[str], str],
    what: str,
    further: str,
    without: Sequence[str] = (),
) -> str:
    """`what` stands before a name in its heading, where a page has two lists with the same names."""
    names = sorted(builders)
    titles = {name: f"{what} {name}".strip() for name in names}
    rows = [(f"[`{name}`](#{titles[name].replace(' ', '-')})", first_line(doc(name))) for name in names]
    lines = [table(("name", "what it is"), rows)]
    for name in names:
        lines += [
            f"### {titles[name]}\n",
            f"{plain(doc(name))}\n",
            f"{options_line(builders[name], OWN_FURTHER.get(builders[name], further), without)}\n",
        ]
    return "\n".join(lines)
