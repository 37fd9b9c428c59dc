"""Preprocessors (rows of a data set to conversations) of all installed distributions."""

from twinkle_core.lazy import attach

__getattr__, __dir__, _ = attach(__name__, kind="preprocessor")
