"""Owners of bytes: tickets, the tensors thread, the memory budget, kept contributions."""
