"""Data folder, checkpoints, votes, scratch files, logs."""
