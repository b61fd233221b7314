"""What can only be checked on a host with a GPU; ``make check-gpu`` runs it. See docs/gpu.md."""
