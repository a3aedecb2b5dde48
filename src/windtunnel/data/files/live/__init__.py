"""The real world of `data.files`: hosts of three processes, and the fronts through which they are used."""
