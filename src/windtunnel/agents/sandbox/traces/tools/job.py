"""A background job: job.py FILE appends three lines to the file, then waits for ever."""

import signal
import sys

with open(sys.argv[1], "a", buffering=1) as file:
    for number in (1, 2, 3):
        file.write(f"step {number}\n")
    while True:
        signal.pause()
