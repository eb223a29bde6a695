"""`temper metrics --page`: docs/metrics.md, from the tables that runs are described by.

Owns: the page. Nothing on it is typed twice.
"""

from __future__ import annotations

from pathlib import Path

from temper.commands.pages.entries import table
from temper.runs.flops import PEAK_FLOPS
from temper.runs.metrics import SECTIONS, Metric
from temper.runs.time_split import PHASES

INTRO = """# Metrics

Written by `temper metrics --page docs`; do not edit. `temper metrics NAME` explains one,
`temper report RUN --csv FILE` writes those of a run as a table.

Every mean is a sum and a count, added up over microbatches and ranks before it is divided; extrema are extrema of all;
percentiles come from counts in fixed bins, or from all values where they are whole numbers. So no number depends on how
a batch was split, packed or ordered. Metrics under `sys/` and `judge/` depend on the machine; all others are a function
of data and weights, equal to the bit after a resume. A metric that could not be measured is absent, never 0. "*" stands
for the rest of a name.

"Trained tokens" were drawn by the policy and belong to a response that is trained; a rejection rule does not remove
them from any denominator. "Generated groups", "responses" and "scored responses" are those of all groups this step
rolled, trained and dropped, so that filtering does not flatter a reward. A histogram is ten metrics, `/00` to `/09`,
that add up to 1.
"""

LEDGER = """The seconds of a step are stored by phase and add up to the wall clock from its report to the one before.
What follows a report (recording, evaluation, checkpoint) is therefore in the seconds of the next step; after the last
step it is in none.
"""

MFU = """`sys/mfu` is `FLOPs / (seconds * peak)` over the training phases. FLOPs are those that had to be computed:
- a token: 2 N forward, 2 N for the gradient of the states, 2 N for that of the weights, with N parameters of matrices
  inside the layers (of experts, those that work on one token). Weights below an adapter have no gradient: 4 N;
- the head: the same, with its own parameters, for trained tokens alone. Embeddings are looked up;
- attention: 4 `width` forward and 8 backward in every layer, for every token and each one that it sees (itself and all
  before it, or its window), with `width` heads times their size;
- a prompt that rows of a microbatch share counts once; rows without credit have a forward pass alone, and so has a
  proximal policy; activations that are computed again, padding, other models and constrained steps beyond their
  gradient are not counted.

N = 7e9, 28 layers, width 3584, a row of 8192 tokens, trained whole, without the head: 4.693e10 FLOPs a token; 3,000
tokens/s on 989e12 FLOP/s is an MFU of 0.142. Peaks are dense, in TFLOP/s; on other devices the metric is absent.
"""


def write_page(folder: Path) -> Path:
    page = folder / "metrics.md"
    page.write_text(page_text())
    return page


def page_text() -> str:
    parts = [INTRO]
    for title, metrics in SECTIONS.items():
        parts += [f"## {title}\n", table(("metric", "unit", "counted", "reduction", "meaning"), map(_row, metrics))]
    phases = ([f"`{name}`", meaning] for name, meaning in PHASES.items())
    parts += ["## Time\n", LEDGER, table(("phase", "what happens"), phases)]
    dtypes = ("bfloat16", "float16", "float8", "float32")
    peaks = (
        [name, *(f"{by_dtype[dtype] / 1e12:g}" if dtype in by_dtype else "-" for dtype in dtypes)]
        for name, by_dtype in PEAK_FLOPS.items()
    )
    parts += ["## Utilisation\n", MFU, table(("GPU", *dtypes), peaks)]
    return "\n".join(parts)


def explain(metric: Metric) -> str:
    """One metric, for the terminal."""
    of = f"{metric.reduction} over {metric.mask}" + (f", in {metric.unit}" if metric.unit else "")
    return f"{metric.name}: {metric.meaning}\n  {of}"


def _row(metric: Metric) -> list[str]:
    return [f"`{metric.name}`", metric.unit, metric.mask, metric.reduction, metric.meaning]
