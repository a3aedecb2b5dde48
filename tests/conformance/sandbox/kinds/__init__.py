"""Programs that each use one thing of the kernel; run inside of sandboxes as ``python3 -m kinds``."""
