"""From text to token windows: tokenizers, sources of documents, the token cache, and batches by step."""
