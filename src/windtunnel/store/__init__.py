"""What is kept: runs in a database, objects by their content, logs of events. Each is imported by its module,
so that an agent that writes a log does not load a database."""
