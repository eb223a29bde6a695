"""Frozen weights in 4 bits: the NF4 format, the layers that hold it, and their arithmetic under an adapter."""
