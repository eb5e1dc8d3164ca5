"""The daemon imports nothing large that it does not need: it runs on every node beside the training."""

from __future__ import annotations

import subprocess
import sys

IMPORTED = """
import sys
import elasticd.main
assert "structlog" not in sys.modules, "imported before lean.start"
elasticd.main.lean.start()
import elasticd.service
from elastic.etcd import etcd3_import
etcd3_import.load()
print(*sys.modules)
"""
"""As `elasticd.main` does it, up to the first call of etcd."""

LARGE = {"rich", "pygments", "importlib.metadata", "http.client", "prometheus_client", "numpy", "torch"}


def test_no_large_module_is_imported_before_it_is_used() -> None:
    """rich alone is 6 MB; structlog imports it where it is installed, as here."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "grpc" in done.stdout.split()
    assert not LARGE & set(done.stdout.split())
