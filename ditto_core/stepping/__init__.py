"""Two sessions stepped on the same tokens; every tap is compared and dropped at once."""
