"""Environments in worker processes: who asks them (pool.py), who answers (program.py), how that is said (frames.py)."""
