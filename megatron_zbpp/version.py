"""The version of this package, once for all."""

__version__ = '0.1.0'
