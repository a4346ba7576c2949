"""Text to tokens: a tokenizer's files, the chat template, and which tokens are whose."""
