"""Capabilities for those who draw chips."""
