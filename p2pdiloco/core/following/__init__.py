"""Following: keeping up with the heaviest chain that others hold."""
