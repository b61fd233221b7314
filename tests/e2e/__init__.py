"""End to end on real engines."""
