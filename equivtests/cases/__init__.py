"""Cases as plain data: what is trained, on which numbers, under which contract."""
