"""One file a backend; ``base`` holds the protocol."""
