"""The endpoint picker for Envoy: the ext_proc protocol in front of the router."""
