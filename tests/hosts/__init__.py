"""Real NeMo on several hosts, which are namespaces of this machine: `make test-hosts`."""
