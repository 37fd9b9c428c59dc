"""twinkle's components on the workers of a Ray cluster: ``twinkle.initialize(mode="ray", groups=[...])``."""
