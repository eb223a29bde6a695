"""Rewards on how a response is written: format, tags, schema, instructions, language, length, repetition, words."""
