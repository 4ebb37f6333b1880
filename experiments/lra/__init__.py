"""The Long Range Arena, small and of the paper's sizes."""
