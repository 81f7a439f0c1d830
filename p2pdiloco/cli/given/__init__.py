"""Runs from what exists: a model, its files, its tokenizer (`run new --from`, `--tokenizer`)."""
