"""The state that agents serve and ingresses and extenders follow: types and codec."""
