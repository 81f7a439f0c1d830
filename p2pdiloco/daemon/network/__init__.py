"""What a node knows of its network: peers and how they are found, reachability, and what the link carries."""
