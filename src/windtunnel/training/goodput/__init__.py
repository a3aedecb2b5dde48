"""What failures cost a job of thousands of hosts, and what to do about it, emulated."""
