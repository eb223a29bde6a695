"""Rewards that were trained: reward models, process rewards, discriminators."""
