"""What the judging verbs do: eval, compare, best, choose, scale, label-steps, verify."""
