"""Named causes."""
