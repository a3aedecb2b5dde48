"""What runs a cluster: its state in a database, past requests replayed, agents on its hosts."""
