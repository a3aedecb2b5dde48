"""What is decided for pipeline templates, as plain functions: no clock, no I/O, no torch."""
