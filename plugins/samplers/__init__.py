"""The built-in samplers, one module each; options.py holds what they share."""
