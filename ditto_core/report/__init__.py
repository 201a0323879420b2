"""Views of a comparison: text for terminals and exceptions, and other forms. Nothing in here judges or measures."""
