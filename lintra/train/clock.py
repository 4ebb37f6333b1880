"""Times in progress reports; commands that train nothing show them so too, without Lightning."""

SECONDS_PER_LINE = 10  # where there is no terminal to draw a bar on


def clock(seconds: float) -> str:
    """h:mm:ss or m:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
