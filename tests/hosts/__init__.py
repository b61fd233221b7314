"""Three hosts as network namespaces, with links that can be made slower: ``make test-hosts``."""
