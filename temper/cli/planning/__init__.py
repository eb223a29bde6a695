"""Verbs that say what a recipe would need and how fast it would be, before it runs."""
