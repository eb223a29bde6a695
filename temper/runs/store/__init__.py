"""The run store: run.db, what is written into it and how it is packed."""
