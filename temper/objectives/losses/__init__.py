"""Losses that are not policy gradients: likelihood, preferences, reward models, distillation."""
