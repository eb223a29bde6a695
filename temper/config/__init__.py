"""What a recipe may say (sections), how it is read (recipe) and written (toml)."""

from temper.config.recipe import load_recipe, merge, parse_override, resolve, section_of
from temper.config.sections import RewardConfig, RunConfig, Section, SourceConfig
from temper.config.toml import to_toml

__all__ = [
    "RewardConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "load_recipe",
    "merge",
    "parse_override",
    "resolve",
    "section_of",
    "to_toml",
]
