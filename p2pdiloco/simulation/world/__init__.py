"""What surrounds simulated nodes: plan, clock, network, disks, faults."""
