"""What at least two services use and that knows no service's domain: errors, configuration, tasks, logs, RPC."""
