"""Deterministic simulation of a swarm: the production core under a virtual clock, a faulty network and crashes."""
