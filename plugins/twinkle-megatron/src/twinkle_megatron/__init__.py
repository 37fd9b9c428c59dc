"""twinkle's backend for Megatron-Core."""
