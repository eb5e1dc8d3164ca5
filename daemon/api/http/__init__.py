"""HTTP/1.1 on a listening socket."""
