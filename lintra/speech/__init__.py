"""Speech: audio, features, corpora and symbols before the network, decoding and scoring after it."""
