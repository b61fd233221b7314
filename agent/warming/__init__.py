"""Warm-up: loading the prefix of a hot document into engines before anybody asks about it."""
