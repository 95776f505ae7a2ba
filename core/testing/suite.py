"""What the conformance suites share. They need no pytest, but pytest collects their subclasses named `Test...`."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Suite:
    """Tests are methods named `test_*` that take nothing; each raises AssertionError when something does not hold."""

    @classmethod
    def names(cls) -> list[str]:
        """The names of the suite's tests, in alphabetical order."""
        return [name for name in dir(cls) if name.startswith("test_")]


def check(condition: object, message: str) -> None:
    """Raises AssertionError with this message; unlike an assert statement it is not compiled away by `python -O`."""
    if not condition:
        raise AssertionError(message)


def check_raises(action: Callable[[], object], expected: type[Exception], what: str) -> Exception:
    """The exception that the action raises. Raises AssertionError when it raises none, or one of another class."""
    try:
        action()
    except expected as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what} raises {error!r}, not a {expected.__name__}") from error
    raise AssertionError(f"{what} does not raise a {expected.__name__}")


def failures(suite: type[Suite], names: Iterable[str] | None = None) -> dict[str, Exception]:
    """Run a suite, or these tests of it, without pytest: those that failed, with what they raised."""
    failed: dict[str, Exception] = {}
    for name in suite.names() if names is None else names:
        try:
            getattr(suite(), name)()
        except Exception as error:
            failed[name] = error
    return failed
