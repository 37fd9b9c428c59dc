"""twinkle's backend for Hugging Face transformers."""
