"""Mathematical answers: where they stand, how they are written, whether two are the same."""
