"""Several components together, over real sockets."""
