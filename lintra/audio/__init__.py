"""From a waveform to features, and the symbols of a text. No model is in it."""
