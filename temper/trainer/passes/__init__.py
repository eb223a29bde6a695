"""Forward and backward passes over packed rows: states, log-probabilities, attention, shared prompts."""
