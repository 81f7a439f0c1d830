"""Sources of samples: text, documents, images, streams, tokenizers."""
