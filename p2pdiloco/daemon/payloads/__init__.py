"""Who owns which bytes: tickets, the tensor thread, the memory budget, kept contributions."""
