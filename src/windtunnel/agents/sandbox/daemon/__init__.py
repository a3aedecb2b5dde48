"""The daemon of one host: a Unix socket and, with a token, HTTP, in front of a ``Host``.

Endpoints are thin: each is one call of the host on a thread, in the sandbox's order where it changes
something.
"""
