"""A run's files: manifests, version 0, tokenizers, results, what a restart finds."""
