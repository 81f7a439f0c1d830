"""Arithmetic on tensors: layout, codecs, merging, the outer step, the vault."""
