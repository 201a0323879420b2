"""What the operating system, the GPU driver and the process give us: files, child processes, fingerprints, receipts."""
