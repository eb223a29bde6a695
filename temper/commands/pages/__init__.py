"""Pages that are written from the code: objectives and metrics."""
