"""What a recipe may say (sections), how it is read (recipe) and written (toml)."""

from temper.config.beside import look_beside
from temper.config.complaints import known_keys, section_of
from temper.config.recipe import load_recipe, merge, parse_override, read_table, resolve
from temper.config.references import FIRST, check_references, refer, references
from temper.config.section import Section
from temper.config.sections import RewardConfig, RunConfig, SourceConfig
from temper.config.toml import to_toml

__all__ = [
    "FIRST",
    "RewardConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "check_references",
    "known_keys",
    "load_recipe",
    "look_beside",
    "merge",
    "parse_override",
    "read_table",
    "refer",
    "references",
    "resolve",
    "section_of",
    "to_toml",
]
