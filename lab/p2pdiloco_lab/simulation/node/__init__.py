"""A simulated node: the production core, and a daemon without tensors or sockets."""
