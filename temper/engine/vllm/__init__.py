"""vLLM behind the sampler's seam."""
