"""Real swarms on one machine: demo, chaos, shaped links; and vectors for the simulator."""
