"""Measurements of speed and memory, recorded with the machine they were made on."""
