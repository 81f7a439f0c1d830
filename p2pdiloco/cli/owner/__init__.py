"""Commands of a machine's owner to the node that runs on it."""
