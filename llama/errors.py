"""The one exception class of the package."""


class LlamaError(ValueError, AssertionError):
    """A mistake in what the caller handed in; the message names value, limit and next step.

    It is a ``ValueError``, as Python's own functions would raise, and an ``AssertionError``, which
    callers of the published package catch.  A file that is missing is a ``FileNotFoundError``.
    """
