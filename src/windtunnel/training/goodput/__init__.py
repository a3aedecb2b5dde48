"""What failures cost a job of thousands of machines, and what to do about it, emulated."""
