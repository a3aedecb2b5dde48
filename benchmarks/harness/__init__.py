"""What benchmarks are written with: `rows` (a figure), `run` (the table of sections), `measure` (repeats in
turn, quantiles, scratch folders), `show` (tables, Markdown, JSON), `jobs` (training that is struck), `ranks`.
"""
