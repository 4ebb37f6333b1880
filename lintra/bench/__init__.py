"""Measurements of speed and memory, written down with the machine they were made on."""
