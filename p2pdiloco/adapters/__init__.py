"""The world: network and disk."""
