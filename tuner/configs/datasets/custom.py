"""Your own file: name it with --data; the format is detected from its columns."""
