"""World around simulated nodes: plan, clock, network, disks, faults."""
