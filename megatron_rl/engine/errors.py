"""Errors of the engine that several of its files raise."""


class UnsupportedModelError(ValueError):
    """This combination of model, layout and machine cannot be built."""
