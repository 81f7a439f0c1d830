"""Being found and finding: presence records, addresses, reachability, who reads which data."""
