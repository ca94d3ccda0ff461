"""For tools that ask for setup.py; the package is described in pyproject.toml."""

from setuptools import setup

setup()
