"""Times in progress reports, also for commands that do not train and so need no Lightning."""

SECONDS_PER_LINE = 10  # without a terminal to draw a bar on


def clock(seconds: float) -> str:
    """h:mm:ss or m:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
