"""Groups become rows with credit (samples), rows become microbatches (pack)."""

from temper.batching.pack import pack, shard
from temper.batching.rows import rows_of, rows_of_groups, with_column
from temper.batching.samples import CreditRules, assign_credit, make_batch

__all__ = [
    "CreditRules",
    "assign_credit",
    "make_batch",
    "pack",
    "rows_of",
    "rows_of_groups",
    "shard",
    "with_column",
]
