"""What every part stands on: errors, units, files, paths, processes. Knows nothing of the rest."""
