"""Survey of the causal architectures of `transformers`: which ones come through a run as they were."""
