"""Other tools' configs and command lines -> recipes of ours: read as data, translated key by key, nothing dropped."""
