"""Simulators, and real swarms on one machine (demo, chaos, shaped links): what one experiments with."""
