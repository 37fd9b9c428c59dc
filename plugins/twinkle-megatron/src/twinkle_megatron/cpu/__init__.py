"""What stands in for a GPU where there is none, so that every layout runs on a laptop and in CI."""
