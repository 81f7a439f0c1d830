"""Network namespaces: links that can be cut, slowed down and shaped."""
