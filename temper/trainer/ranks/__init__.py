"""Trainer ranks: what they add up, what rank 0 says to the others, and the trainer that all of them are together."""
