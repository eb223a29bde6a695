"""What a run achieved, as text, tables and pictures."""
