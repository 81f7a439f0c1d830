"""Web page, metrics and health of a node or bootstrap: what is shown, and the server that shows it."""
