"""The transport on libp2p, and its twin in memory."""
