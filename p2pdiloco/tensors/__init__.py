"""The numbers: layout, codecs, merging, the outer step, the vault."""
