"""Put on PYTHONPATH, this folder changes Python programs as its ``sitecustomize`` says."""
