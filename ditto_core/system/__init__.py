"""Services of the operating system, the driver and the process: files, child processes, fingerprints, build info."""
