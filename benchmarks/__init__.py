"""Measurements of this server, and the random checkpoints they run on."""
