"""The contracts. What plugin authors subclass is re-exported lazily by ``twinkle_core``."""
