"""`temper presets --page`: docs/objectives.md and its pictures, from the code that trains.

Owns: the page. Every formula, default and curve on it is read from the factors; nothing is typed twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from temper.objectives import (
    DIRECT_LOSSES,
    POLICY_GRADIENTS,
    PRESETS,
    DirectLoss,
    Objective,
    PolicyObjective,
    Tokens,
    TopTokens,
)
from temper.objectives.factor import NEEDS, Factor
from temper.objectives.losses.table import LOSSES
from temper.objectives.policy.gates import GATES
from temper.objectives.resolve import REGISTRY
from temper.runs.report.plot import Line, Panel, chart
from temper.stages.kinds import KINDS, kinds_for

PICTURES = "gates"
SEEN_TOGETHER = ("clip", "cispo", "sapo", "dppo_tv")
"""Gates in one picture, so that their difference is seen."""
PROXIMAL_PROBABILITY = 0.15
"""Of the drawn token in the pictures: DPPO looks at probabilities, not only at the ratio."""
RATIOS = torch.linspace(0.0, 6.0, 601, dtype=torch.float64).clamp(min=1e-3)

INTRO = """# Objectives

Written by `temper presets --page docs`; do not edit. `temper presets NAME` prints one objective,
`temper presets --compare dapo gspo` what differs between two.

An objective is a product of factors. Rewards are **shaped**, compared into **advantages**, **normalised**; the policy's
**ratio** to a **proximal** policy goes through a **gate**; **corrections** multiply; the **weighting** holds every
denominator; **regularisers** add terms of their own:

    loss = -sum over tokens of gate(ratio, advantage) * corrections * weight + regularisers

Any factor of a preset can be replaced in a recipe: `objective.gate = "sapo"`, or
`objective.gate = {name = "clip", high = 0.28}`; lists compose: `objective.corrections = ["token_tis", "veto"]`.

A **direct loss** stands in place of all these: of given texts, of pairs, of scores, of the distance from a
teacher. `objective.loss = {beta = 0.3}` changes a preset's; each kind of stage takes [its own](#direct-losses).
"""


def write_page(folder: Path) -> Path:
    """Writes objectives.md and gates/*.svg below `folder`; returns the page."""
    pictures = folder / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for name, picture in gate_pictures().items():
        (pictures / f"{name}.svg").write_text(picture)
    page = folder / "objectives.md"
    page.write_text(page_text())
    return page


def page_text() -> str:
    parts = [INTRO, _gates_section(), _presets_section(), _needs_section()]
    multiplied = {kind: builders for kind, builders in REGISTRY.items() if kind not in ("gate", "loss")}
    parts += [_section(kind.capitalize(), builders) for kind, builders in multiplied.items()]
    return "\n".join([*parts, _losses_section()])


def gate_pictures() -> dict[str, str]:
    """One picture per gate, and one of several together: gain and gradient weight against the ratio."""
    pictures = {name: chart(_panels({name: build()})) for name, build in GATES.items()}
    pictures["together"] = chart(_panels({name: GATES[name]() for name in SEEN_TOGETHER}))
    return pictures


def _panels(gates: Mapping[str, Factor[Any, Any]]) -> list[Panel]:
    curves = {(name, sign): gate_curve(gate, sign) for name, gate in gates.items() for sign in (1.0, -1.0)}
    if len(gates) == 1:
        labels: dict[tuple[str, float], str] = {(n, s): "A = +1" if s > 0 else "A = -1" for n, s in curves}
        kept = [curves]
        titles = [""]
    else:
        labels = {(name, sign): name for name, sign in curves}
        kept = [{key: curve for key, curve in curves.items() if key[1] == sign} for sign in (1.0, -1.0)]
        titles = [", A = +1", ", A = -1"]
    panels = []
    for part, title in zip(kept, titles, strict=True):
        for place, what in enumerate(("gain", "gradient weight")):
            lines = [Line(label=labels[key], xs=RATIOS.tolist(), ys=curve[place]) for key, curve in part.items()]
            panels.append(Panel(title=what + title, lines=lines, x_label="ratio", x_range=(0.0, 6.0), marks=(1.0,)))
    return panels


def gate_curve(gate: Factor[Any, Any], advantage: float) -> tuple[list[float], list[float]]:
    """Gain, and gradient weight -dl/dlog pi / A, at every ratio of RATIOS; each token a trajectory of its own.

    The gain is the weight integrated over log pi from ratio 1: what the gradient climbs. The value of gates that stop
    gradients is not, and could not be compared.
    """
    count = len(RATIOS)
    proximal_T = torch.full((count,), PROXIMAL_PROBABILITY, dtype=torch.float64).log()
    policy_T = (proximal_T + RATIOS.log()).requires_grad_()
    num_top = dict(gate.arguments).get("k") or 1
    tokens = Tokens(
        policy_logprobs=policy_T,
        proximal_logprobs=proximal_T,
        behavior_logprobs=proximal_T,
        advantages=torch.full((count,), advantage, dtype=torch.float64),
        weights=torch.ones(count, dtype=torch.float64),
        trajectory_ids=torch.arange(count),
        num_trajectories=count,
        num_batch_tokens=count,
        versions=torch.zeros(count, dtype=torch.int64),
        token_ids=torch.zeros(count, dtype=torch.int64),
        top=TopTokens(
            ids=torch.arange(int(num_top)).expand(count, -1),
            anchor_logprobs=_with_others(proximal_T, int(num_top)),
            policy_logprobs=_with_others(policy_T.detach(), int(num_top)),
        ),
    )
    gain_T = gate(tokens, tokens.policy_logprobs - tokens.proximal_logprobs).value
    slope_T = torch.autograd.grad(gain_T.sum(), policy_T)[0]
    climbed_T = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumulative_trapezoid(slope_T, RATIOS.log())])
    at_one = int((RATIOS - 1).abs().argmin())
    return (climbed_T - climbed_T[at_one]).tolist(), (slope_T / advantage).tolist()


def _with_others(logprobs_T: torch.Tensor, num_top: int) -> torch.Tensor:
    """[T, K]: the drawn token, and others that share the rest of the probability evenly."""
    others_T = torch.log((1 - logprobs_T.exp()).clamp(min=1e-9) / num_top)
    return torch.stack([logprobs_T, *[others_T] * (num_top - 1)], dim=1)


def _gates_section() -> str:
    lines = [
        "## Gates",
        "",
        "How far one update may move a token. Left: the gain that the gradient climbs. Right: the weight",
    ]
    lines += ["of its gradient, where 1 is plain policy gradient and 0 means that the token no longer learns."]
    lines += [f"The drawn token had probability {PROXIMAL_PROBABILITY}.", ""]
    lines += [f"PPO, CISPO, SAPO and DPPO together:\n\n![{' '.join(SEEN_TOGETHER)}]({PICTURES}/together.svg)", ""]
    for name, build in GATES.items():
        lines += [*_entry(name, build), f"![{name}]({PICTURES}/{name}.svg)", ""]
    return "\n".join(lines)


def _presets_section() -> str:
    lines = [
        "## Presets",
        "",
        "Factors of the same kind are separated by commas; a dagger marks experimental ones.",
        "",
        "| preset | advantage | ratio | gate | weighting | beside that | source |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_preset_row(preset) for preset in POLICY_GRADIENTS.values()]
    lines += ["", "Presets with a direct loss:", "", "| preset | stage | reads | loss | beside that | source |"]
    lines += ["|---|---|---|---|---|---|", *map(_loss_row, DIRECT_LOSSES.values())]
    reasons = [f"- `{name}`: {'; '.join(p.why_experimental)}" for name, p in PRESETS.items() if p.why_experimental]
    return "\n".join([*lines, "", "Experimental, and why:", "", *reasons, ""])


def _preset_row(preset: PolicyObjective) -> str:
    others = [*preset.shaping, *preset.normalizers, *preset.emphasis, *preset.corrections, *preset.regularizers]
    others += [*preset.controllers, *(rule for rule in (preset.critic, preset.reference, preset.step) if rule)]
    others += [preset.proximal] if preset.proximal.name != "trainer" else []
    beside = ", ".join([*map(str, others), *sorted(preset.wants)]) or "-"
    return _row(preset, preset.advantage, preset.ratio, preset.gate, preset.weighting, beside)


def _loss_row(preset: DirectLoss) -> str:
    beside = ", ".join([*map(str, preset.controllers), *sorted(preset.wants)]) or "-"
    return _row(preset, ", ".join(kinds_for(preset.name)), preset.loss.reads, preset.loss, beside)


def _row(preset: Objective, *cells: object) -> str:
    dagger = " †" if preset.why_experimental else ""
    texts = [str(cell).replace("|", "\\|") for cell in (*cells, preset.source)]
    return f"| `{preset.name}`{dagger} | " + " | ".join(texts) + " |"


def _losses_section() -> str:
    lines = ["## Direct losses", "", "Which a stage may train with:", "", "| stage | losses |", "|---|---|"]
    for kind in KINDS.values():
        named = ["a policy gradient" if loss is None else f"`{loss}`" for loss in kind.losses]
        lines.append(f"| {kind.name} | {', '.join(named) if kind.trains else 'nothing is trained'} |")
    return "\n".join([*lines, "", *_entries(LOSSES)])


def _needs_section() -> str:
    lines = ["## What a factor may need", "", "| need | what it is | presets |", "|---|---|---|"]
    for need, text in NEEDS.items():
        users = ", ".join(f"`{name}`" for name, preset in PRESETS.items() if need in preset.needs) or "-"
        lines.append(f"| {need} | {text} | {users} |")
    return "\n".join([*lines, ""])


def _section(title: str, builders: Mapping[str, Callable[..., Any]]) -> str:
    return "\n".join([f"## {title}", "", *_entries(builders)])


def _entries(builders: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    for name, build in builders.items():
        yield from _entry(name, build)


def _entry(name: str, build: Callable[..., Any]) -> Iterator[str]:
    """Name with defaults, then the docstring."""
    parameters = inspect.signature(build).parameters.values()
    settings = ", ".join(
        str(p).split(":")[0] + (f"={p.default!r}" if p.default is not p.empty else "") for p in parameters
    )
    yield f"### `{name}({settings})`"
    yield ""
    yield inspect.getdoc(build) or ""
    yield ""
