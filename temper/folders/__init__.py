"""Directories of models and rows: where they are found, whether they are what was written, how a model is read."""
