"""Several samplers behind one Sampler."""
