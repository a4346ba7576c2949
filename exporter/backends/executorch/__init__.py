"""ExecuTorch: see `exporter.backends` for what each module is."""
