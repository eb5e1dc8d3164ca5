"""Worker processes: forked, watched, described, ended."""
