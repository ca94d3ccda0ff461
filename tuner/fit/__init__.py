"""Whether it fits: bytes on paper, from architecture facts alone."""
