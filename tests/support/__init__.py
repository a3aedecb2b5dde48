"""What tests of several folders share: waiting, processes that start with torch in them, worlds of ranks."""
