"""Verbs that explain: the guide, objectives, metrics, keys of a recipe, pages of the reference."""
