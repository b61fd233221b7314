"""KV memory on CUDA devices: allocated so that it can be shared, mapped, copied, staged.

Only the CUDA driver's own library is used, by ctypes and when first needed: no toolkit, no
torch, nothing to build. The engine allocates (``allocation``), a mover opens what it was given
(``opening``) and copies on the device (``device_backend``), or through pinned memory where
the bytes have to leave the host (``staging``).

Nothing in here has run on a GPU yet; ``make check-gpu`` is what runs there. See docs/gpu.md.
"""
