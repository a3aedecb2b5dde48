"""Sessions of agents as data: read from files, or generated so that every turn has a known true class.

A *trace* is what an agent asked of its sandbox, turn by turn, with the seconds its model thought in between.
``schema`` holds it as a JSON-lines file; ``generate`` makes sessions of the turns in ``recipes``.
"""
