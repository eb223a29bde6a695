"""From two lists of log-probabilities to the name of what sets them apart.

Owns: the comparison and the diagnosis, both pure. Refuses: sampling and scoring (check.py gathers the evidence), and
guessing: where no single cause explains most of the gap, it says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from temper.errors import BackendError
from temper.types import Sample

EXPLAINED = 1 / 3
"""A cause is named when taking it away leaves less than this share of the gap. Budgets are a few times the noise, so a
gap above one falls at least this far once its only cause is gone."""
ROUNDING = 1e-4
"""No cause but rounding makes a largest gap below this."""
SAME_TEMPERATURE = 0.01
"""Two temperatures that differ by a smaller share are one: the slope through rounding errors is near 1 by itself."""
GRID = 2.0**-10
"""Differences of bfloat16 or float16 numbers of size 1 and more are multiples of it."""

MOST_MOVED = 0.1
"""Largest share of the experts that a sampler tells and the trainer's routers would not choose, before it is asked
whose they are. Over 160 random models (4 families, 32 to 256 wide, 1 to 6 layers, 1 to 8 of 2 to 128 experts, three
dtypes) honest rounding moves at most 0.5%; routes of the token before or behind, or of any token, at least 17%."""
NO_ROUTES = "none"
"""In Evidence.other_routes: nothing was replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The sampler's most likely next tokens of one context, scored by both sides. Within one context the normaliser of
    the softmax cancels, so that a temperature, a normaliser and a difference of logits can be told apart."""

    num_context: int
    sampled: tuple[float, ...]
    recomputed: tuple[float, ...]

    @property
    def gaps(self) -> list[float]:
        return [again - sampled for sampled, again in zip(self.sampled, self.recomputed, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was tried after a gap was found. Gaps are means over the same tokens as the agreement's."""

    temperature: float
    """What the sampler was asked for."""
    probes: tuple[Probe, ...]
    alone_gap: float
    """Gap with every row scored by itself."""
    other_starts: dict[str, float]
    """Gap by what was done to the start of every row before it was scored again."""
    other_routes: dict[str, float] = field(default_factory=dict)
    """Gap by where the routes that were replayed came from. Empty: none were."""
    other_moved: dict[str, float] = field(default_factory=dict)
    """Agreement.moved by the same, without NO_ROUTES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far recomputed log-probabilities are from sampled ones."""

    num_tokens: int
    mean_gap: float
    max_gap: float
    first_token_gap: float = 0.0
    """Mean gap over the first drawn token of each row."""
    slope: float = 1.0
    """Recomputed over sampled log-probabilities, by least squares through the origin."""
    quarter_gaps: tuple[float, ...] = ()
    """Mean gap by quarter of the tokens, in the order of their positions."""
    moved: float = 0.0
    """Share of the experts that the sampler tells and the trainer's routers would not choose. 0: none are replayed."""
    stale: tuple[str, ...] | None = None
    """Names of tensors that differ between sampler and trainer. None: they were not compared."""
    evidence: Evidence | None = None
    """None: nothing was tried yet."""


def measure(
    samples: Sequence[Sample], recomputed: Sequence[Sequence[float]], *, version: int | None = None
) -> Agreement:
    """Compares behavior log-probabilities with the trainer's, over drawn tokens; with `version`, over those it drew."""
    tokens, firsts = [], []
    for sample, row in zip(samples, recomputed, strict=True):
        columns = zip(row, sample.behavior_logprobs, sample.loss_mask, sample.versions, strict=True)
        drawn = [
            (place, sampled, again)
            for place, (again, sampled, is_drawn, drawn_by) in enumerate(columns)
            if is_drawn and version in (None, drawn_by)
        ]
        tokens += drawn
        firsts += [abs(sampled - again) for _, sampled, again in drawn[:1]]
    if not tokens:
        found = sorted({v for s in samples for v, is_drawn in zip(s.versions, s.loss_mask, strict=True) if is_drawn})
        raise BackendError(f"no drawn tokens to compare: wanted those of version {version}, drawn were {found}")
    gaps = [abs(sampled - again) for _, sampled, again in sorted(tokens)]
    squares = sum(sampled * sampled for _, sampled, _ in tokens)
    return Agreement(
        num_tokens=len(gaps),
        mean_gap=mean(gaps),
        # NaN must fail the proof, and max() would hide it.
        max_gap=max(gaps) if all(map(math.isfinite, gaps)) else math.nan,
        first_token_gap=mean(firsts),
        slope=sum(sampled * again for _, sampled, again in tokens) / squares if squares else 1.0,
        quarter_gaps=tuple(mean(gaps[len(gaps) * q // 4 : len(gaps) * (q + 1) // 4] or gaps) for q in range(4)),
    )


def moved_share(samples: Sequence[Sample], by_token: Sequence[Sequence[float]]) -> float:
    """Of the experts by which tokens were drawn that have a record, the share that the trainer's routers would not
    choose. by_token: the trainer's score of them by "routers"."""
    shares = []
    for sample, row in zip(samples, by_token, strict=True):
        known = [False, *(len(route) > 0 for route in sample.routes or ())]  # a token is drawn by the one before it
        columns = zip(row, sample.loss_mask, known, strict=False)
        shares += [moved for moved, is_drawn, has_record in columns if is_drawn and has_record]
    return mean(shares)


def has_wrong_routes(agreement: Agreement) -> bool:
    """Whether the routes that were replayed are not those that the sampler took, by what was tried. Many moved experts
    alone prove nothing where replaying them brings both sides together."""
    evidence = agreement.evidence
    if agreement.moved <= MOST_MOVED or evidence is None:
        return False
    shift = _shift_by_choice(agreement, evidence)
    return shift is not None or evidence.other_routes[NO_ROUTES] <= agreement.mean_gap


def _shift_by_choice(agreement: Agreement, evidence: Evidence) -> str | None:
    """To which other tokens these experts belong, by what the routers would choose."""
    change, moved = min(evidence.other_moved.items(), key=lambda item: item[1], default=("", math.inf))
    is_shift = agreement.moved > MOST_MOVED and moved <= EXPLAINED * agreement.moved
    return change if is_shift else None


def diagnose(agreement: Agreement) -> str:
    """The one cause that explains the gap, or an honest account that there is none."""
    if not math.isfinite(agreement.mean_gap):
        return "Some log-probabilities are not finite numbers: look for an overflow, or for broken weights on one side"
    if agreement.stale:
        return _stale(agreement.stale)
    if agreement.evidence is None:
        return "No experiment was made to find the cause: engine.canary_every=1 makes them after every publication"
    if agreement.max_gap < ROUNDING and not has_wrong_routes(agreement):
        return "This is rounding: the two sides use different kernels, or one kernel whose result depends on the batch"
    for cause in CAUSES:
        if (named := cause(agreement, agreement.evidence)) is not None:
            return named
    return _no_single_cause(agreement)


def _stale(names: Sequence[str]) -> str:
    listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    if len(names) == 1:
        return f"The sampler holds a stale tensor, {listed}: it was not published, or changed after it was"
    return f"The sampler holds other weights than the trainer, {len(names)} tensors: {listed}. They did not arrive"


def _lost_boundaries(agreement: Agreement, evidence: Evidence) -> str | None:
    if evidence.alone_gap > EXPLAINED * agreement.mean_gap:
        return None
    return (
        f"Rows scored one by one agree (gap {evidence.alone_gap:.3g}), scored together they do not: the "
        f"trainer's packing loses sequence boundaries or positions"
    )


def _other_prompt(agreement: Agreement, evidence: Evidence) -> str | None:
    change, gap = min(evidence.other_starts.items(), key=lambda item: item[1], default=("", math.inf))
    if gap > EXPLAINED * agreement.mean_gap:
        return None
    return (
        f"The sampler saw other prompts than it reports: {change}, they agree (gap {gap:.3g}). Look for an extra BOS, "
        f"or one that was taken away, on the way into the sampler"
    )


def _moved_routes(agreement: Agreement, evidence: Evidence) -> str | None:
    explaining = {change: gap for change, gap in evidence.other_routes.items() if gap <= EXPLAINED * agreement.mean_gap}
    if (shift := _shift_by_choice(agreement, evidence)) is not None:  # seen where the gap drowns in rounding, too
        explaining = {shift: evidence.other_routes[shift]}
    if not explaining:
        return None
    change, gap = next(iter(explaining.items()))  # a shift before NO_ROUTES, which explains every shift, too
    if change == NO_ROUTES:
        return _nobodys(gap)
    return (
        f"The routes that the sampler tells are those of other tokens: replayed {change}, they agree (gap {gap:.3g}). "
        f"Look for a token too many or too few between the sampler and the rows"
    )


def _routes_of_nobody(agreement: Agreement, evidence: Evidence) -> str | None:
    """Asked last: whatever sets the two sides apart moves experts, too."""
    return _nobodys(evidence.other_routes[NO_ROUTES]) if has_wrong_routes(agreement) else None


def _nobodys(gap: float) -> str:
    return (
        f"With the choice of the trainer's own routers they agree (gap {gap:.3g}): the sampler tells other routes "
        f"than it took. Use model.replay_routes = false until it does"
    )


def _temperature(agreement: Agreement, evidence: Evidence) -> str | None:
    """log p(a) - log p(b) = (z_a - z_b) / T: another temperature scales all these differences alike."""
    pairs = [pair for probe in evidence.probes for pair in zip(*_centred(probe), strict=True)]
    squares = sum(sampled * sampled for sampled, _ in pairs)
    if not squares:
        return None
    slope = sum(sampled * again for sampled, again in pairs) / squares
    before = sum((again - sampled) ** 2 for sampled, again in pairs)
    after = sum((again - slope * sampled) ** 2 for sampled, again in pairs)
    if after > EXPLAINED**2 * before or slope <= 0 or abs(slope - 1) < SAME_TEMPERATURE:
        return None
    asked = evidence.temperature
    return (
        f"Differences of recomputed log-probabilities are {slope:.3f} times the sampled ones: a temperature. Asked was "
        f"{asked:g}; either the sampler used {asked * slope:.3g} or the trainer {asked / slope:.3g}"
    )


def rounded_head(probes: Sequence[Probe], temperature: float) -> str | None:
    """Names the side whose logits are numbers of half precision, if it is one of the two; needs no gap to see it."""
    by_side = {
        "sampler": is_on_grid((probe.sampled for probe in probes), temperature),
        "trainer": is_on_grid((probe.recomputed for probe in probes), temperature),
    }
    rounded = [side for side, is_on_grid in by_side.items() if is_on_grid]
    if len(rounded) != 1:
        return None
    return (
        f"The head of the {rounded[0]} rounds to half precision: its logits differ by multiples of {GRID:g} only, "
        f"those of the other side do not. Compute its logits in float32"
    )


def _half_precision(agreement: Agreement, evidence: Evidence) -> str | None:
    return rounded_head(evidence.probes, evidence.temperature)


def _normaliser(agreement: Agreement, evidence: Evidence) -> str | None:
    """Truncated sampling leaves the differences within one context as they are and shifts all of them, one way."""
    offsets = [mean(probe.gaps) for probe in evidence.probes]
    shapes = [
        again - sampled for probe in evidence.probes for sampled, again in zip(*_centred(probe), strict=True)
    ]  # what is left once every context is shifted by its own offset
    shift = mean(offsets)
    against = [offset for offset in offsets if offset * shift < 0]
    is_one_sided = sum(map(abs, against)) <= EXPLAINED * 0.1 * sum(map(abs, offsets))
    if not offsets or not is_one_sided or _size(shapes) > EXPLAINED * _size(offsets):
        return None
    mass = mean(math.exp(-abs(offset)) for offset in offsets)
    if shift < 0:
        return (
            f"The sampler normalises over about {mass:.0%} of the probability and the trainer over all of it: the "
            f"sampler truncates (top_p, top_k, min_p; a default of generation_config.json?), the trainer was not told"
        )
    return (
        f"The trainer normalises over about {mass:.0%} of the probability and the sampler over all of it: the "
        f"sampler's log-probabilities are not renormalised after top_p, top_k or min_p"
    )


def _positions(agreement: Agreement, evidence: Evidence) -> str | None:
    """A context of one token sees only itself: neither rotary positions nor masks matter to it."""
    short = [abs(gap) for probe in evidence.probes if probe.num_context == 1 for gap in probe.gaps]
    long = [abs(gap) for probe in evidence.probes if probe.num_context > 1 for gap in probe.gaps]
    if not short or not long or mean(short) > EXPLAINED * mean(long):
        return None
    return (
        f"Contexts of one token agree (gap {mean(short):.3g}), longer ones do not (gap {mean(long):.3g}; by position "
        f"{_listed(agreement.quarter_gaps)}): positions differ. Look at the model family, rotary embedding (theta, "
        f"scaling), sliding window and attention mask"
    )


CAUSES: tuple[Callable[[Agreement, Evidence], str | None], ...] = (
    _lost_boundaries,
    _moved_routes,
    _other_prompt,
    _temperature,
    _half_precision,
    _normaliser,
    _positions,
    _routes_of_nobody,
)
"""Asked in this order; each answers only when it alone explains the gap."""


def _no_single_cause(agreement: Agreement) -> str:
    weights = (
        "the weights were not compared: look there first"
        if agreement.stale is None
        else "all weights are equal: look at copies made of them (a float32 head, fused projections, captured graphs)"
    )
    return (
        f"No single cause explains it. It is not packing, the prompt, temperature, truncation, the head's precision or "
        f"positions alone; {weights}. First token {agreement.first_token_gap:.3g}, by position "
        f"{_listed(agreement.quarter_gaps)}, slope {agreement.slope:.3f}"
    )


def _centred(probe: Probe) -> tuple[list[float], list[float]]:
    """Both sides without the mean of their context, and so without the normaliser of the softmax."""
    sampled_mean, again_mean = mean(probe.sampled), mean(probe.recomputed)
    return [value - sampled_mean for value in probe.sampled], [value - again_mean for value in probe.recomputed]


def is_on_grid(contexts: Iterable[Sequence[float]], temperature: float) -> bool:
    """Whether logits seem to be half-precision numbers: their differences are then multiples of a power of two."""
    steps = [(value - values[0]) * temperature / GRID for values in contexts for value in values[1:]]
    # A hundredth of the grid: four of a hundred float32 differences would pass for multiples by chance.
    near = sum(abs(step - round(step)) < 0.02 for step in steps)
    return len(steps) >= 8 and near >= 0.9 * len(steps)


def _size(values: Sequence[float]) -> float:
    return math.sqrt(mean(value * value for value in values))


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values)
