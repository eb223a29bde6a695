"""What each stage of a run added: one line per stage, in the report.

Owns: the lines and their columns. Refuses: reading the run (report.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from temper.runs.report.summary import Kept, ScoreChange, StageSummary

LEFT, COLUMN = 55, 28
"""Characters before the first score, and of one score."""


def stage_lines(stages: Sequence[StageSummary]) -> list[str]:
    """Scores that several stages have stand in columns; what a stage alone has follows them in words."""
    found = Counter(change.name for stage in stages for change in _trained(stage))
    columns = [name for name, times in found.items() if times > 1]
    head = f"  {'what each stage added':<22}{'steps':>6}{'time':>7}{'drawn':>9}{'GiB':>6}"
    lines = [head.ljust(LEFT) + "".join(f"{name + ', %':<{COLUMN}}" for name in columns).rstrip()]
    return [*lines, *(_line(stage, columns) for stage in stages)]


def _line(stage: StageSummary, columns: Sequence[str]) -> str:
    work, memory = stage.work, stage.peak_memory_bytes
    name = f"{stage.stage + 1} {stage.name}{f' from {stage.starts_from}' if stage.starts_from else ''}"
    gib = "" if memory is None else f"{memory / 2**30:.2f}"
    left = f"  {name:<22}{work.num_steps:>6,}{clock(sum(work.seconds.values())):>7}{work.tokens_drawn:>9,}{gib:>6}"
    scores = {change.name: change for change in _trained(stage)}
    cells = [_cell(scores[name]) if name in scores else "" for name in columns]
    words = [f"{name} {_cell(change)}" for name, change in scores.items() if name not in columns]
    if stage.kept is not None:
        words.append(_kept(stage.kept))
    return (left.ljust(LEFT) + "".join(f"{cell:<{COLUMN}}" for cell in cells if any(cells)) + "; ".join(words)).rstrip()


def _trained(stage: StageSummary) -> Sequence[ScoreChange]:
    """Rejection sampling leaves the policy as it was: two scores of the same weights show no change."""
    return stage.scores if stage.kept is None else ()


def _cell(change: ScoreChange) -> str:
    """'10.2 → 45.7 ±6.1 (+35.5)'."""
    first, last = change.first, change.last
    gain = "not comparable" if change.gain is None else f"{100 * change.gain:+.1f}"
    return f"{100 * first.score:.1f} → {100 * last.score:.1f} ±{50 * (last.high - last.low):.1f} ({gain})"


def _kept(kept: Kept) -> str:
    return (
        f"kept {kept.rows:,} answers ({kept.share:.1%}) to {kept.prompts:,} prompts; "
        f"reward {kept.mean_reward:.3f}, best of each group {kept.best_reward:.3f}"
    )


def clock(seconds: float) -> str:
    """'3:12'."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
