"""Programs that play episodes by themselves and only know HTTP."""
