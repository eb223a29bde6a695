"""The real loop over a virtual clock, with a sampler and a trainer that only take time."""
