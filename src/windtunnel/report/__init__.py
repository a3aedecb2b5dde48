"""Tables, pages and timelines of a run: plain data in, text and files out. Knows no capability.

`terminal` prints a summary, `html` writes the page, `perfetto` the timeline, `chakra` the execution graphs.
"""
