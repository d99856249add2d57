"""What a terminal is shown. Nothing heavy is imported here: every command needs it."""
LONGEST = 4000  # characters of a line


def printable(line: str) -> str:
    """A line with its control characters escaped, by which names in a file could steer the terminal. Of a very long
    one, such as a prompt of megabytes, the middle is left out."""
    if len(line) > LONGEST:
        line = f"{line[:LONGEST // 2]} .. {line[-LONGEST // 2:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
