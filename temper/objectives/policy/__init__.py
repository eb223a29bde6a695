"""What a policy gradient is made of beside credit: ratio, gate, corrections, weighting, regularisers."""
