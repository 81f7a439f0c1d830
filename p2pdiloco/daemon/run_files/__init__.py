"""Files of a run: manifests, version 0, tokenizers, results, what a restart finds."""
