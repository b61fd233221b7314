"""The node agent: the authority on its node's engines, their blocks and their load."""
