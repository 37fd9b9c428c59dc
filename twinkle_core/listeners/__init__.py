"""Listeners to hooks that come with twinkle (L0 at import): ``with plugins.listening(JsonLinesWriter(...)): ...``."""
