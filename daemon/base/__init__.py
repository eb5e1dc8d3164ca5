"""What every part of the daemon uses: settings, log, errors, threads, folders, safe text."""
