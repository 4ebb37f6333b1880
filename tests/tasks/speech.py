"""A few artificial recordings to learn from: each letter is a tone."""

import json
import wave
from pathlib import Path

import numpy as np

TONES = {"A": 400.0, "B": 900.0, "C": 1_600.0}  # Hz
RATE = 8_000
SECONDS = 0.12  # per letter


def tones(text: str) -> np.ndarray:
    """A tone for each letter, silence for a space, and a little noise [n] in [-1, 1]."""
    draw = np.random.default_rng(len(text))
    time = np.arange(round(RATE * SECONDS)) / RATE
    parts = [0.3 * np.sin(2 * np.pi * TONES[x] * time) if x in TONES else 0 * time for x in text]
    samples = np.concatenate([np.zeros(0), *parts])
    return samples + 0.01 * draw.standard_normal(len(samples))


def write_wave(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32_767).astype(np.int16).tobytes())
    return path


def text_of(i: int) -> str:
    letters = "".join("ABC"[(i // 3**k) % 3] for k in range(3))
    return f"{letters[:2]} {letters[2]}" if i % 2 else letters


def write_manifest(folder: Path, texts: list[str], name: str = "train.jsonl") -> Path:
    """Write a manifest of these texts, each spoken in tones."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, text in enumerate(texts):
        file = write_wave(folder / f"{name}-{i}.wav", tones(text or "A"))
        lines.append(json.dumps({"audio": file.name, "text": text, "id": f"u{i}"}))
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def write_kaldi(folder: Path, texts: list[str], bins: int = 5) -> Path:
    """Write a Kaldi folder of features: some frames per letter, with numbers that identify the letter."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, feats, said = np.random.default_rng(0), [], []
    for i, text in enumerate(texts):
        rows = [np.full((8, bins), " ABCD".index(x)) for x in text]
        frames = np.concatenate([np.zeros((1, bins)), *rows]) + 0.1 * draw.standard_normal(
            (8 * len(text) + 1, bins)
        )
        np.save(folder / f"{i}.npy", frames.astype(np.float32))
        feats.append(f"u{i} {i}.npy")
        said.append(f"u{i} {text}")
    (folder / "feats.scp").write_text("\n".join(feats) + "\n")
    (folder / "text").write_text("\n".join(said) + "\n")
    return folder
