"""The built-in route groups: one module or package per wire form."""
