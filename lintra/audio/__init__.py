"""Features of waveforms, and the symbols of texts, without any model."""
