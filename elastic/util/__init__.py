"""Small operating-system helpers that more than one part uses: processes, descriptors, files, names."""
