"""Access to the world: network and disk."""
