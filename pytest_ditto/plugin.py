"""Hooks and options only."""
