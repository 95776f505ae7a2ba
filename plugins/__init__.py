"""The built-in plugins: backends, samplers and route groups, on the same hooks as anybody else's."""
