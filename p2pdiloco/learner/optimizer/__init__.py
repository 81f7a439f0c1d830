"""The inner optimizer and its learning rate."""
