"""Talking HTTP to engines: requests sent as they are, answers read as they come."""
