"""The data that flows through Temper, one type per stage, so that a type says what has been computed.

Owns: shapes of data and their invariants. Refuses: behaviour; nothing here imports another Temper module.
"""

from temper.types.batches import (
    OPTIONAL_COLUMNS,
    Batch,
    EvaluationResult,
    Microbatch,
    PromptHistory,
    Publication,
    Sample,
    StepReport,
    Trace,
    Traces,
    TrainResult,
    total_tokens,
)
from temper.types.checks import require_parallel
from temper.types.columns import Column, Ragged, array_of, join_ragged, no_lists
from temper.types.events import LASTING, REFUSED, Event, EventKind, lasting
from temper.types.rollouts import (
    TRAINABLE_STATUSES,
    Completion,
    Finish,
    Group,
    Message,
    Request,
    SamplingParams,
    Scalar,
    Status,
    Task,
    Trajectory,
    Turn,
)
from temper.types.scores import Score, ScoreKind

__all__ = [
    "LASTING",
    "OPTIONAL_COLUMNS",
    "REFUSED",
    "TRAINABLE_STATUSES",
    "Batch",
    "Column",
    "Completion",
    "EvaluationResult",
    "Event",
    "EventKind",
    "Finish",
    "Group",
    "Message",
    "Microbatch",
    "PromptHistory",
    "Publication",
    "Ragged",
    "Request",
    "Sample",
    "SamplingParams",
    "Scalar",
    "Score",
    "ScoreKind",
    "Status",
    "StepReport",
    "Task",
    "Trace",
    "Traces",
    "TrainResult",
    "Trajectory",
    "Turn",
    "array_of",
    "join_ragged",
    "lasting",
    "no_lists",
    "require_parallel",
    "total_tokens",
]
