"""What every capability's bench is written with.

A capability's ``bench`` is a table of sections and functions that yield rows:

    SECTIONS = {"speed": "speed.speed_rows", "memory": "memory.memory_rows"}  # below its own package
    run = runner(__name__, SECTIONS)

`rows` has the row and the runner, `measure` what measuring takes (repeats in turn, quantiles, scratch
folders), `show` the table on the terminal, in Markdown and as JSON.
"""
