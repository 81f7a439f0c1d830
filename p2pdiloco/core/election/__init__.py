"""A group's office: who may hold it, who stands, who votes."""
