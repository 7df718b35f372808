"""Device code of the attention step, one op a file."""
