"""Device code of the boundary, one op a file."""
