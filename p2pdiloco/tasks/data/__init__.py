"""Where samples come from: text, documents, images, streams, tokenizers."""
