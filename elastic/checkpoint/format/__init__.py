"""The format of a checkpoint on disk: names, manifest, shards, dtypes, errors."""
