"""Features of waveforms, and the symbols of texts; no model is in it."""
