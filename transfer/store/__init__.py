"""A store of KV that engines share: state packets with their bodies, in files or in Redis."""
