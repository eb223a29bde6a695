"""Verbs that judge checkpoints and verifiers."""
