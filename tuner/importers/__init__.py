"""Converts other tools' configs and command lines to recipes: read as data, translated key by key."""
