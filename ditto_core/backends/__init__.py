"""One file for each backend; ``base`` holds the protocol."""
