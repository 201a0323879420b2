"""An engine beside its reference: what the ``ditto`` fixture is."""
