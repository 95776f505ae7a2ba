"""Backends: each turns one kind of model file into a model on a device."""
