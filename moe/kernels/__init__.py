"""Device code of the low-batch MoE."""
