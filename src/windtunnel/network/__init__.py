"""Networks: what they are shared by, in which order, and over which fabrics."""
