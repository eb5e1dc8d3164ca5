"""For a job's `preload`: its workers strike themselves as the plan says that ELASTIC_TESTING in their `env` names."""

from __future__ import annotations

from .injection import install

install(here=False)
