"""Stand-ins for real peers; each is checked against captures of the real thing."""
