"""Proof that sampler and trainer agree: before step 1, after every publication, row by row."""
