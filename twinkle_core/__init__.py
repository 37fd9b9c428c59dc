"""twinkle's core: contracts, registry, training state, built-in components."""
