"""Deterministic simulation of a swarm: the production core, a virtual clock, a faulty network, crashes."""
