"""From the zygote to the script: forking, imports, the script as `__main__`."""
