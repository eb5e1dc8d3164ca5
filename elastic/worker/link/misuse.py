"""Errors for what the script does wrong with elastic's API or state: the next try would do the same.

    MisuseError
      MisuseRuntimeError, MisuseTypeError, MisuseValueError, MisuseAttributeError: also what their names say, and
        documented as that
      state.json_codec.CannotEncodeError

The first that leaves `elastic.run` is reported to the agent, and ends the job at once. An error that follows from the
end of a generation is none of these.
"""

from __future__ import annotations

from collections.abc import Iterator

WAIT_S = 1.0
"""A refusal may follow from a failed collective whose error the script has handled. The agent knows of the lost rank
within this time."""


class MisuseError(Exception):
    """elastic refuses what the script does. The message has the fix."""


class MisuseRuntimeError(MisuseError, RuntimeError):
    """At this point of the script, or in this order of calls."""


class MisuseTypeError(MisuseError, TypeError):
    """With values of this type."""


class MisuseValueError(MisuseError, ValueError):
    """With this value."""


class MisuseAttributeError(MisuseError, AttributeError):
    """Set on the state, which has no part of this name, or keeps the object that it was built with."""


class MisuseIgnored(BaseException):
    """The script has handled a refusal of its step (the cause), and goes on. Not an Exception, as what has handled the
    first one would handle this one as well."""

    def __init__(self, refused: MisuseError) -> None:
        super().__init__(f"the script has caught this error of elastic's, and goes on: {refused}")
        self.__cause__ = refused


ends_run = ""
"""What was refused when `elastic.run`, or the script, ended with that; for the report of this process's exit."""


def note(error: BaseException) -> None:
    """`error` leaves `elastic.run`, or the script."""
    global ends_run
    if refused := found_in(error):
        ends_run = f"{type(refused).__name__}: {refused}"


def found_in(error: BaseException) -> MisuseError | None:
    """`error`, or the refusal that it was raised from."""
    return next((each for each in causes(error) if isinstance(each, MisuseError)), None)


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what it was raised from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


AGAIN = (
    "elastic.run is called a second time in this program, and the job was complete after the first: put phases, and "
    "the folds of k-fold, into one train, as loops one after the other (docs/loop.md, Phases)"
)
_called = False


def refuse_second_run() -> None:
    """An agent's worker calls `elastic.run`. Raises MisuseRuntimeError at the second time."""
    global _called
    if _called:
        note(error := MisuseRuntimeError(AGAIN))
        raise error
    _called = True
