"""The process that holds the sandboxes of a home, and answers for them."""
