"""Ways to move bytes between two memories, behind one contract (see ``contract``)."""
