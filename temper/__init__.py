"""Temper: reinforcement-learning post-training of language models, small, exact, and honest about failure."""

__version__ = "0.1.0"
