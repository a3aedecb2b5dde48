"""Sandboxes for real: namespaces, snapshots, process images, and the host that runs them all."""
