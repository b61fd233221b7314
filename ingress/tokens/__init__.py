"""From a request to block keys: tokenizing once, and remembering what was tokenized."""
