"""Layers of a mixture of experts: how tokens are routed, the products of many experts, which routes were taken."""
