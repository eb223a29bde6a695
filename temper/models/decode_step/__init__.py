"""A decode step on a GPU, layer by layer: fewer launches than the walk of many tokens, each begun before it is due."""
