"""From a model source to a module, and from the module to an exported graph with named sites."""
