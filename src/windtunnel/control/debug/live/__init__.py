"""Past requests on a real database: recorded, asked about, replayed, and tried with changed code."""
