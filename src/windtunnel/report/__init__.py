"""Tables, pages and timelines of a run: plain data in, text and files out. Knows no capability.

`terminal` prints a summary, `html` writes the report of a run, `page` is the frame of every page, `timeline`
writes what Perfetto opens, `chakra` the execution graphs.
"""
