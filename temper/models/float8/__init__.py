"""Matrices of a sampler in 8-bit floating point."""
