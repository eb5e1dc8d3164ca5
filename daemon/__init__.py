"""The per-node daemon. The folder is ``daemon/``; it is installed as ``elasticd``."""

if __name__ != "elasticd":
    raise ImportError(f"imported as {__name__!r}: install the project (pip install -e .) and import 'elasticd'")
