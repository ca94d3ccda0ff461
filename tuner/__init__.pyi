from tuner.api import *  # noqa: F403  its __all__ is the list of public names

__version__: str
