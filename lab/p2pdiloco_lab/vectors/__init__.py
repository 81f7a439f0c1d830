"""A small model as real vectors, for `simulate --vectors`."""
