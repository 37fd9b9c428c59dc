"""Many tenants on one base model: LoRA adapters in slots that are allocated once."""
