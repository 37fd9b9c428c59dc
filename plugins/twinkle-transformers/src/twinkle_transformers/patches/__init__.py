"""Patches: other ways for a transformers model to compute the same."""
