"""The Dockerfiles, built for real and run as the chart runs them; see ``__main__``."""
