"""A fragment's versions, watermarks, and how much of them everybody has."""
