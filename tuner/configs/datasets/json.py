"""Your own JSON file, under XTuner's name: name it with --data; the format is detected from its columns."""
