"""Focal loss for twinkle, and a metric of how much of a batch is still hard."""
