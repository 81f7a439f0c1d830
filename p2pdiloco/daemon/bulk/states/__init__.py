"""States of fragments: copied from several holders, given to newcomers."""
