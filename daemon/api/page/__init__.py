"""HTML: a job's report as a file, and the live page of the cluster in a browser."""
