"""Engines that run as pods of this node, and the own Node."""
