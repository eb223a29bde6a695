"""What a recipe may say (sections), how it is read (recipe) and written (toml)."""

from temper.config.beside import look_beside
from temper.config.complaints import known_keys, section_of
from temper.config.recipe import load_recipe, merge, parse_override, read_table, resolve
from temper.config.references import DATA_KEYS, FIRST, Reference, refer, references
from temper.config.section import Section
from temper.config.sections import RunConfig
from temper.config.sources import RewardConfig, SourceConfig, StageSource, part_names
from temper.config.toml import to_toml

__all__ = [
    "DATA_KEYS",
    "FIRST",
    "Reference",
    "RewardConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "StageSource",
    "known_keys",
    "load_recipe",
    "look_beside",
    "merge",
    "parse_override",
    "part_names",
    "read_table",
    "refer",
    "references",
    "resolve",
    "section_of",
    "to_toml",
]
