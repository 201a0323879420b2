"""What a backend's author runs against it: the promises of a backend and of its sessions, each as a check."""

from ditto_core.testing.suite import BackendCheck, backend_checks, check_backend

__all__ = ["BackendCheck", "backend_checks", "check_backend"]
