"""The ways in which models write tool calls (L1): one a file, each with ``parse(text) -> (rest, calls)``."""
