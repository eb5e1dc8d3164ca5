"""`replace` for msgspec structs and dataclasses alike, with its fields checked: msgspec declares those of a struct as
Any, while mypy takes a struct for a dataclass, whose fields it knows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:

    def replace(record: Any, /, **fields: Any) -> Any:
        """A copy of `record` with other values of these fields."""
        change = msgspec.structs.replace if isinstance(record, msgspec.Struct) else dataclasses.replace
        return change(record, **fields)
