"""Multicast between racks over passive splitters, relayed hop by hop (Shufflecast).

``policy`` says who relays what, which multicasts go at once, and whom a rack asks for what it lacks; ``twin``
emulates that in both engines beside an electrical network, ``plan`` puts the two together for the verb;
``live`` makes racks of processes, network namespaces and tc, and sends files through them.
"""
