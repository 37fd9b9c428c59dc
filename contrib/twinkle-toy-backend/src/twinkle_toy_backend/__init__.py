"""A complete backend for twinkle in plain PyTorch: two layers, low-rank adapters, several data ranks."""
