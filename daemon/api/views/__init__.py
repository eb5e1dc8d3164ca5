"""What is said of nodes, jobs, ranks and problems: answers of the API, and the columns of screen and page. Pure."""
