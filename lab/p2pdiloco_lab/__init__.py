"""Simulators of the protocol, and real swarms under faults (chaos): what one experiments with."""
