"""Decision records: what was known about a request, what was decided, what happened then."""
