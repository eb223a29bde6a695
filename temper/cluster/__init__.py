"""Processes beside the driver: how one is started and ended, and the main that it runs."""
