"""Questions about training language models by reinforcement, each answered by a page whose command shows the answer."""
