"""The engine's real world: tensors, the step loop and the HTTP server."""
